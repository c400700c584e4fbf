"Gradients that are summed in a higher precision than the parameters have"
import pytest
from contextlib import suppress
from harness import *
from fastai_accum.extras.precision import *
from fastai_accum.patch import *

sys.path.insert(0, str(Path(__file__).resolve().parents[2]/'benchmarks'))
from common import peak_bytes

class Low(Callback):
    "Inputs in the dtype of the model, and predictions in float64, so that the loss is exact"
    def before_batch(self): self.learn.xb = tuple(o.to(next(self.model.parameters()).dtype) for o in self.xb)
    def after_pred(self): self.learn.pred = self.pred.double()

def low_learner(dtype, bs, cbs, n=64, opt_func=SGD, **kwargs):
    return make_learner(make_dls(n, bs, shuffle=False), small_model().to(dtype), opt_func=opt_func,
                        cbs=[Low(), *L(cbs)], **kwargs)

def exact_window(dtype, idxs, micro, y=None, loss=None):
    """The mean gradient over samples `idxs`, of micro-batches that go backward in `dtype` one by one, summed in
    float64. Losses are scaled by their weights, relative to the first"""
    model,x,y = small_model().to(dtype),features(64),classes(64) if y is None else y
    parts = [idxs[i:i+micro] for i in range(0, len(idxs), micro)]
    ws = [len(j) if loss is None else loss.weight[y[j]].sum().item() for j in parts]
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for j,w in zip(parts, ws):
        model.zero_grad()
        ((loss or F.cross_entropy)(model(x[j].to(dtype)).double(), y[j])*(w/ws[0])).backward()
        for s,p in zip(sums, model.parameters()): s += p.grad.double()
    return [s*ws[0]/sum(ws) for s in sums]

def ulps(a, exact):
    "The largest distance of `a` from `exact`, in units in the last place of the dtype of `a` at the exact value"
    info,res = torch.finfo(a.dtype),exact.abs()
    ulp = torch.exp2(torch.floor(torch.log2(res.clamp(min=info.smallest_normal))))*info.eps
    return ((a.double()-exact).abs()/ulp).max().item()

by_class = nn.CrossEntropyLoss(weight=torch.tensor([1.,7.,30.]).double())

@pytest.mark.parametrize('loss', [None, by_class], ids=['mean','weighted'])
@pytest.mark.parametrize('micro', [8,1])
@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
def test_two_units_in_the_last_place(dtype, micro, loss):
    "The first window of a fit against the same low-precision gradients, summed in float64"
    def error(cbs):
        learn = low_learner(dtype, micro, [AccumulateStep(64//micro), *cbs], loss_func=loss)
        learn.fit(1)
        return max(map(ulps, learn.spy.steps[0]['grads'], exact_window(dtype, list(range(64)), micro, loss=loss)))
    assert error([GradAccumDtype()]) <= 2
    if micro==1: assert error([]) > 2   # what it is for

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
def test_each_gradient_is_freed(dtype):
    """No low-precision gradient is there when the next micro-batch begins, and when one is added the ones before are
    gone"""
    left = []
    def look(cb):
        if not cb.training or cb.accumulate_step.window.n_micro==1: return
        left.append([p.grad is None for p in cb.model.parameters()])
    learn = low_learner(dtype, 8, [AccumulateStep(4), GradAccumDtype(),
                                   Callback(before_batch=look, after_backward=look)])
    learn.fit(1)
    assert len(left)==12 and all(all(o) for o in left)
    assert all(g.dtype==dtype for s in learn.spy.steps for g in s['grads'])

@pytest.mark.parametrize('cbs', [lambda: [], lambda: [GradientClip(.01)]], ids=['plain','clip'])
@pytest.mark.parametrize('kw', [dict(n=76), dict(n=76, drop_last=True), dict(n=50, skip={3,4,20})], ids=str)
def test_exact_where_nothing_is_low(kw, cbs):
    "For parameters in float64 the callback changes nothing"
    def train(bs, cbs):
        learn = make_learner(make_dls(bs=bs, shuffle=False, **kw), cbs=cbs)
        learn.fit_one_cycle(2, .02)
        return learn
    a = train(8, [AccumulateStep(4), GradAccumDtype(), *cbs()])
    assert_same(a, train(8, [AccumulateStep(4), *cbs()]) if 'skip' in kw else train(32, cbs()))

def has_no_hooks(learn):
    assert not any(p._post_accumulate_grad_hooks for p in learn.model.parameters())
    assert learn.accumulate_step.window is None and learn.grad_accum_dtype.sums is None

@pytest.mark.parametrize('exc', [KeyboardInterrupt, OSError, CancelTrainException, CancelEpochException,
                                 CancelFitException, CancelBatchException])
@pytest.mark.parametrize('event', ['before_batch','before_backward','after_backward',
                                   'before_step','after_step','after_batch'])
def test_nothing_is_left(event, exc):
    "However a fit ends, no hook and no sum is left, and what follows is what follows without the callback"
    if exc is CancelBatchException and event=='after_batch':
        exc = CancelTrainException   # `after_batch` is outside what that one cancels
    def stop(cb):
        if cb.training and cb.epoch==0 and cb.micro.i==stop.at: raise exc('stopped')
    def train(cbs):
        stop.at = 3 if event in ('before_step','after_step') else 5
        learn = make_learner(make_dls(76, 8, shuffle=False), cbs=[AccumulateStep(4), *cbs])
        with suppress(KeyboardInterrupt, OSError): learn.fit(1, cbs=Callback(**{event:stop}))
        if cbs: has_no_hooks(learn)
        learn.spy.steps = []
        learn.fit(1)
        return learn
    assert_same(train([GradAccumDtype()]), train([]))

def test_with_the_rest(tmp_path):
    "`lr_find`, the patch, unfreezing in the middle of an epoch, micro-batches that are left out"
    def unfreeze(cb):
        if cb.training and cb.epoch==0 and cb.micro.i==2: cb.learn.unfreeze()
    def leave_out(cb):
        if cb.training and cb.micro.i in (1,7): raise CancelBatchException
    def train(cbs):
        learn = make_learner(make_dls(76, 8), path=tmp_path, cbs=[Callback(before_batch=unfreeze),
                                                                  Callback(after_loss=leave_out), *cbs])
        learn.freeze()
        with accumulation(4):
            learn.fit(2)
            learn.lr_find(num_it=10, show_plot=False, suggest_funcs=None)
        return learn
    assert_same(train([GradAccumDtype()]), train([]))

def test_sparse():
    "Sparse gradients are summed as they are"
    class Bag(nn.Module):
        def __init__(self):
            super().__init__(); torch.manual_seed(0)
            self.emb,self.lin = nn.Embedding(20, 6, sparse=True),nn.Linear(6,3)
        def forward(self, x): return self.lin(self.emb(x).mean(1))
    def train(bs, cbs):
        dls = make_dls(60, bs, x=torch.randint(20, (60,3), generator=torch.Generator().manual_seed(0)), shuffle=False)
        learn = make_learner(dls, Bag().double(), splitter=trainable_params,
                             opt_func=partial(OptimWrapper, opt=torch.optim.SGD), cbs=cbs)
        learn.remove_cb(Spy)
        learn.fit(1)
        return [p.detach() for p in learn.model.parameters()]
    assert rel(train(8, [AccumulateStep(4), GradAccumDtype()]), train(32, []))[0] <= TOL

def test_deepcopy_inside(tmp_path):
    copies = []
    def copy(cb):
        if cb.training and cb.micro.i==1: copies.append((deepcopy(cb.learn.model), pickle.dumps(cb.learn.model)))
    learn = make_learner(make_dls(60, 8), cbs=[AccumulateStep(4), GradAccumDtype(), Callback(after_backward=copy)])
    learn.fit(1)
    assert copies and not any(p._post_accumulate_grad_hooks for p in copies[0][0].parameters())

def both(fit=lambda l: l.fit(1), cbs=lambda: [], more=None, **kwargs):
    "`fit` with and without the callback, in float64, where it must not make a difference"
    res = []
    for extra in [more or GradAccumDtype], []:
        learn = make_learner(make_dls(76, 8, **kwargs.pop('dls_kw', {})),
                             cbs=[AccumulateStep(4), *[o() for o in extra], *cbs()], **kwargs)
        fit(learn)
        res.append(learn)
    return res

class Learned(nn.Module):
    "A loss with parameters of its own"
    def __init__(self):
        super().__init__()
        self.t,self.loss = nn.Parameter(torch.ones(3).double()),nn.CrossEntropyLoss(weight=by_class.weight)
    def forward(self, pred, y): return self.loss(pred*self.t, y)

def test_parameters_outside_the_model():
    res = []
    for cbs in [GradAccumDtype()], []:
        lf = Learned()
        acc = AccumulateStep(4, weight=lambda p,y: by_class.weight[y].sum())
        learn = make_learner(make_dls(76, 8), loss_func=lf, splitter=lambda m: [params(m), params(lf)], cbs=[acc, *cbs])
        learn.fit(2)
        res.append([lf.t.detach(), *(p.detach() for p in learn.model.parameters())])
    assert rel(*res)[0]<=TOL

def test_kept_sums():
    for loss in nn.CrossEntropyLoss(reduction='sum'),nn.CrossEntropyLoss(weight=by_class.weight):
        res = []
        for cbs in [GradAccumDtype()], []:
            learn = make_learner(make_dls(76, 8), cbs=[AccumulateStep(4, average=False), *cbs], loss_func=loss)
            learn.fit(1); res.append(learn)
        assert_same(*res)

@pytest.mark.parametrize('at', [1,2,3,4])
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_batch'])
def test_unfreeze_inside(event, at):
    "A parameter that is unfrozen in a window has the gradient of the micro-batches that follow"
    def unfreeze(cb):
        if cb.training and cb.epoch==0 and cb.micro.i==at: cb.learn.unfreeze()
    def fit(learn): learn.freeze(); learn.fit(2)
    assert_same(*both(fit, lambda: [Callback(**{event:unfreeze})], loss_func=by_class))

def test_cancelled_window():
    "The sums of a window that is cancelled do not reach the next one"
    def cancel(cb):
        if cb.training and cb.micro.i==5: raise CancelBatchException
    a,b = both(cbs=lambda: [Callback(after_backward=cancel)], loss_func=by_class)
    assert_same(a, b)

def test_order():
    "Whoever comes before the optimizer and after `AccumulateStep` sees finished gradients, also if it is listed first"
    seen = []
    def look(cb): seen.append([p.grad is not None for p in cb.model.parameters()])
    first = Callback(before_step=look); first.order = -1000
    make_learner(make_dls(64, 8), cbs=[first, GradAccumDtype(), AccumulateStep(4)]).fit(1)
    assert len(seen)==2 and all(map(all, seen))

def test_without_windows(tmp_path):
    "Validation and prediction need no windows: under the patch, and with an `AccumulateStep` that was given to a fit"
    learn = make_learner(make_dls(64, 8), cbs=GradAccumDtype(), path=tmp_path)
    learn.validate(); learn.get_preds()
    with accumulation(4): learn.fit(1); learn.validate()
    learn.fit(1, cbs=AccumulateStep(4))
    learn.validate(); learn.get_preds()
    with pytest.raises(ValueError, match='has no AccumulateStep'): learn.fit(1)

def test_subclass():
    class Mine(AccumulateStep): pass
    learn = make_learner(make_dls(64, 8), cbs=[Mine(4), GradAccumDtype()])
    learn.fit(1)
    assert learn.accumulate_step.counts.n_steps==2

def test_the_mean_fits_where_the_sum_does_not():
    """Weights that grow along the window: the sum of float16 gradients does not fit where their mean does, and is cast
    after the division"""
    y = classes(64).sort().values   # the first micro-batches are of the class that weighs little
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.,5e4,5e4]).double())
    learn = make_learner(make_dls(64, 8, y=y, shuffle=False), small_model().half(), loss, SGD,
                         [Low(), AccumulateStep(8), GradAccumDtype()])
    learn.fit(1)
    grads = learn.spy.steps[0]['grads']
    assert all(g.isfinite().all() for g in grads)
    assert max(map(ulps, grads, exact_window(torch.float16, list(range(64)), 8, y=y, loss=loss)))<=2

class Either(nn.Module):
    "An embedding whose gradient is sparse or, for the micro-batches of `dense`, dense"
    def __init__(self, dense, dtype):
        super().__init__(); torch.manual_seed(0)
        self.n,self.dense,self.emb = 0,dense,nn.Parameter(torch.randn(5,3).to(dtype))
    def forward(self, x):
        self.n += self.training
        return F.embedding(x, self.emb, sparse=self.training and self.n%8 not in self.dense).mean(1).double()

@pytest.mark.parametrize('dense', [[], [0], [1], [2,3], [1,2,3,4,5,6,7,0]], ids=str)
def test_sparse_and_dense(dense):
    def train(bs, cbs, dtype=torch.float64):
        x = torch.randint(5, (64,3), generator=torch.Generator().manual_seed(0))
        learn = make_learner(make_dls(64, bs, x=x, shuffle=False), Either(dense, dtype), splitter=trainable_params,
                             opt_func=SGD, cbs=cbs)
        learn.fit(1)
        return [s['grads'][0].to_dense() for s in learn.spy.steps]
    assert rel(train(8, [AccumulateStep(4), GradAccumDtype()]), train(32, []))[0]<=TOL

def test_sparse_is_cast_once():
    "Entries of the same row are added before they are rounded"
    x = torch.randint(3, (64,4), generator=torch.Generator().manual_seed(0))
    def grad(dtype, cbs, bs):
        learn = make_learner(make_dls(64, bs, x=x, shuffle=False), Either([], dtype), splitter=trainable_params,
                             opt_func=SGD, cbs=cbs)
        learn.fit(1)
        return learn.spy.steps[0]['grads'][0].to_dense()
    model = Either([], torch.bfloat16); model.train()
    exact = torch.zeros(5,3).double()
    for i in range(64):
        model.zero_grad()
        F.cross_entropy(model(x[i:i+1]), classes(64)[i:i+1]).backward()
        exact += model.emb.grad.double().to_dense()/64
    assert ulps(grad(torch.bfloat16, [AccumulateStep(64), GradAccumDtype()], 1), exact)<=2

def test_under_ddp(tmp_path):
    "Gradients are reduced over processes where the hooks take them: refused"
    dist = torch.distributed
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(small_model())
        learn = make_learner(make_dls(64, 8), model, splitter=trainable_params,
                             cbs=[AccumulateStep(4), GradAccumDtype()])
        with pytest.raises(ValueError, match='GradAccumDtype: the model is in DistributedDataParallel'): learn.fit(1)
    finally: dist.destroy_process_group()

def test_two():
    learn = make_learner(make_dls(64, 8), cbs=[AccumulateStep(4), GradAccumDtype()])
    with pytest.raises(ValueError, match='GradAccumDtype: cbs holds more than one'):
        learn.fit(1, cbs=GradAccumDtype(torch.float64))

@pytest.mark.parametrize('v', [32, 'float32', torch.int32, None, torch.float8_e4m3fn])
def test_bad_dtype(v):
    with pytest.raises(ValueError, match='GradAccumDtype: dtype must be a floating dtype such as torch.float32, got'):
        GradAccumDtype(v)

def test_needs_accumulate_step():
    with pytest.raises(ValueError, match='GradAccumDtype: the learner has no AccumulateStep'):
        make_learner(make_dls(60, 8), cbs=GradAccumDtype()).fit(1)

def test_peak_memory():
    "A plain run keeps 2 bytes a parameter for gradients. With sums in float32 it is 4; it would be 6 if both were kept"
    n,d = 8,256
    def train(cbs):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(d, d, bias=False) for _ in range(n)]).to(torch.bfloat16)
        batches = [(torch.randn(2,d).bfloat16(), torch.randn(2,d).bfloat16()) for _ in range(8)]
        learn = Learner(DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None)), model,
                        loss_func=nn.MSELoss(), opt_func=SGD,
                        default_cbs=False, cbs=[TrainEvalCallback(), AccumulateStep(4), *cbs])
        return peak_bytes(lambda: learn.fit(1))/(n*d*d)
    plain,summed = train([]),train([GradAccumDtype()])
    assert plain==pytest.approx(2, rel=.3)
    assert 3.5 < summed-plain+2 < 4.5, (plain, summed)
