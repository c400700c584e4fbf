"Gradients that are summed in a higher precision than the parameters have"
import pytest
from nets import *
from fastai_accum.extras import *
from fastai_accum.know.what_fits import peak_bytes

class Low(Callback):
    "Inputs in the dtype of the model, and predictions in float64, so that the loss is exact"
    def before_batch(self): self.learn.xb = tuple(o.to(next(self.model.parameters()).dtype) for o in self.xb)
    def after_pred(self): self.learn.pred = self.pred.double()

def exact_window(dtype, idxs, micro, y=None, loss=None, model=None, x=None):
    """The mean gradient over samples `idxs`, of micro-batches that go backward in `dtype` one by one, summed in
    float64. Losses are scaled by their weights, relative to the first"""
    model,y = model or small_model().to(dtype),classes(64) if y is None else y
    x = features(64).to(dtype) if x is None else x
    parts = [idxs[i:i+micro] for i in range(0, len(idxs), micro)]
    ws = [len(j) if loss is None else loss.weight[y[j]].sum().item() for j in parts]
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for j,w in zip(parts, ws):
        model.zero_grad()
        ((loss or F.cross_entropy)(model(x[j]).double(), y[j])*(w/ws[0])).backward()
        for s,p in zip(sums, model.parameters()): s += p.grad.double().to_dense()
    return [s*ws[0]/sum(ws) for s in sums]

def ulps(a, exact):
    "The largest distance of `a` from `exact`, in units in the last place of the dtype of `a` at the exact value"
    info,res = torch.finfo(a.dtype),exact.abs()
    ulp = torch.exp2(torch.floor(torch.log2(res.clamp(min=info.smallest_normal))))*info.eps
    return ((a.double()-exact).abs()/ulp).max().item()

by_class = nn.CrossEntropyLoss(weight=torch.tensor([1.,7.,30.]).double())

def error(dtype, micro, *cbs, loss=None, y=None):
    "Of the first window of a fit, against the same low-precision gradients, summed in float64; in units"
    learn = make_learner(make_dls(64, micro, y, shuffle=False), small_model().to(dtype), loss, SGD,
                         [Low(), AccumulateStep(64//micro), *cbs])
    learn.fit(1)
    exact = exact_window(dtype, list(range(64)), micro, y, loss)
    return tensor([*map(ulps, learn.spy.steps[0]['grads'], exact)]).max()   # which may be NaN

def test_the_mean_fits_where_the_sum_does_not():
    "Weights that grow along the window: the sum is cast after the division"
    y = classes(64).sort().values   # the first micro-batches are of the class that weighs little
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.,5e4,5e4]).double())
    assert error(torch.float16, 8, GradAccumDtype(), loss=loss, y=y)<=2

def unfreezes(at, event):
    def f(cb):
        if cb.training and cb.epoch==0 and cb.micro.i==at: cb.learn.unfreeze()
    return Callback(**{event:f})
def leaves_out(event): return lambda: raising(CancelBatchException, event, lambda cb: cb.micro.i in (1,7))

alike = dict(
    tail     = dict(),
    dropped  = dict(drop_last=True),
    shorter  = dict(n=50, skip=(3,4,20)),
    clip     = dict(cbs=lambda: GradientClip(.01)),
    kept_sum = dict(acc=dict(average=False), loss=lambda: nn.CrossEntropyLoss(reduction='sum')),
    loss     = dict(loss=lambda: scaled(by_class), acc=dict(weight=lambda p, y: by_class.weight[y].sum())),
    unfreeze = dict(cbs=lambda: unfreezes(2, 'before_batch'), frozen=True),
    at_end   = dict(cbs=lambda: unfreezes(3, 'after_batch'), frozen=True),
    left_out = dict(cbs=leaves_out('after_loss')),
    cancels  = dict(cbs=leaves_out('after_backward')))

@each(name=alike)
def test_exact_where_nothing_is_low(name):
    "For parameters in float64 the callback changes nothing"
    def train(*sums, acc={}, cbs=list, loss=nn.CrossEntropyLoss, frozen=False, **kwargs):
        lf = loss()
        def split(m): return [params(m[0]), [*params(m[1:]), *lf.parameters()]]
        learn = make_learner(make_dls(**{**dict(n=76, bs=8, shuffle=False), **kwargs}), loss_func=lf, splitter=split,
                             cbs=[AccumulateStep(4, **acc), *sums, *L(cbs())])
        if frozen: learn.freeze()
        learn.fit_one_cycle(2, .02)
        return learn
    a,b = train(GradAccumDtype(), **alike[name]),train(**alike[name])
    assert_same(a, b)
    close(list(a.loss_func.parameters()), list(b.loss_func.parameters()))

class Either(nn.Module):
    "An embedding whose gradient is sparse or, for the micro-batches of `dense`, dense"
    def __init__(self, dense=(), dtype=torch.float64):
        super().__init__(); torch.manual_seed(0)
        self.n,self.dense,self.emb = 0,dense,nn.Parameter(torch.randn(5,3).to(dtype))
    def forward(self, x):
        self.n += self.training
        return F.embedding(x, self.emb, sparse=self.training and self.n%8 not in self.dense).mean(1).double()

def embedded(x, bs, cbs, *args):
    "The gradients of each step"
    learn = make_learner(make_dls(64, bs, x=x, shuffle=False), Either(*args), opt_func=SGD, cbs=cbs, **one_group)
    learn.fit(1)
    return [s['grads'][0].to_dense() for s in learn.spy.steps]

@each(dense=[[], [0], [1], [2,3], [1,2,3,4,5,6,7,0]])
def test_sparse_and_dense(dense):
    x = torch.randint(5, (64,3))
    close(embedded(x, 8, [AccumulateStep(4), GradAccumDtype()], dense), embedded(x, 32, [], dense))

def test_sparse_is_cast_once():
    "Entries of the same row are added before they are rounded"
    x = torch.randint(3, (64,4))
    grad, = embedded(x, 1, [AccumulateStep(64), GradAccumDtype()], (), torch.bfloat16)
    exact, = exact_window(None, list(range(64)), 1, model=Either((), torch.bfloat16), x=x)
    assert ulps(grad, exact)<=2

def test_peak_memory_of_sums():
    "A plain run keeps 2 bytes a parameter for gradients. With sums in float32 it is 4; it would be 6 if both were kept"
    n,d = 8,256
    def train(cbs):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(d, d, bias=False) for _ in range(n)]).to(torch.bfloat16)
        batches = [(torch.randn(2,d).bfloat16(), torch.randn(2,d).bfloat16()) for _ in range(8)]
        learn = Learner(DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None)), model,
                        loss_func=nn.MSELoss(), opt_func=SGD,
                        default_cbs=False, cbs=[TrainEvalCallback(), AccumulateStep(4), *cbs])
        return peak_bytes(lambda: learn.fit(1), default_device())/(n*d*d)
    plain,summed = train([]),train([GradAccumDtype()])
    assert plain==pytest.approx(2, rel=.3)
    assert 3.5 < summed-plain+2 < 4.5, (plain, summed)

def test_without_windows(tmp_path):
    "Validation and prediction need no windows: under the patch, and with an `AccumulateStep` that was given to a fit"
    learn = make_learner(make_dls(64, 8), cbs=GradAccumDtype(), path=tmp_path)
    learn.validate(); learn.get_preds()
    with accumulation(4): learn.fit(1); learn.lr_find(num_it=10, show_plot=False, suggest_funcs=None)
    learn.fit(1, cbs=AccumulateStep(4))
    learn.validate()
    learn.add_cb(AccumulateStep(4)).fit(1)
    with learn:   # by hand
        learn.model.train(); learn.training = True; learn.one_batch(0, learn.dls.one_batch())

def test_refusals(tmp_path):
    for v in 32, 'float32', torch.int32, None, torch.float8_e4m3fn:
        with pytest.raises(ValueError, match='dtype must be a floating dtype such as torch.float32, got'):
            GradAccumDtype(v)
    learn = make_learner(make_dls(64, 8), cbs=GradAccumDtype())
    with pytest.raises(ValueError, match='GradAccumDtype: the learner has no AccumulateStep'): learn.fit(1)
    learn.accumulate(4)
    with pytest.raises(ValueError, match='GradAccumDtype: cbs holds more than one'): learn.fit(1, cbs=GradAccumDtype())
    # gradients are reduced over processes where the hooks take them
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        learn = make_learner(make_dls(64, 8), nn.parallel.DistributedDataParallel(small_model()),
                             cbs=[AccumulateStep(4), GradAccumDtype()], **one_group)
        with pytest.raises(ValueError, match='GradAccumDtype: the model is in DistributedDataParallel'): learn.fit(1)
    finally: torch.distributed.destroy_process_group()
