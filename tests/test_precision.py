"Gradients that are summed in a higher precision than the parameters have"
import pytest
from contextlib import suppress
from harness import *
from fastai_accum.precision import *
from fastai_accum.skip import *
from fastai_accum.patch import *

sys.path.insert(0, str(Path(__file__).resolve().parent.parent/'benchmarks'))
from common import peak_bytes

if not hasattr(Tensor, 'register_post_accumulate_grad_hook'): pytest.skip('needs PyTorch 2.1, as the callback says', allow_module_level=True)

class Low(Callback):
    "Inputs in the dtype of the model, and predictions in float64, so that the loss is exact"
    def before_batch(self): self.learn.xb = tuple(o.to(next(self.model.parameters()).dtype) for o in self.xb)
    def after_pred(self): self.learn.pred = self.pred.double()

def low_learner(dtype, bs, cbs, n=64, opt_func=SGD, **kwargs):
    return make_learner(make_dls(n, bs, shuffle=False), small_model().to(dtype), opt_func=opt_func, cbs=[Low(), *L(cbs)], **kwargs)

def exact_window(dtype, idxs, micro, y=None, loss=None):
    "The mean gradient over samples `idxs` in float64, of micro-batches that go backward in `dtype` one by one"
    model,x,y = small_model().to(dtype),features(64),classes(64) if y is None else y
    sums,W = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()],0
    for i in range(0, len(idxs), micro):
        j = idxs[i:i+micro]
        w = len(j) if loss is None else loss.weight[y[j]].sum().item()
        model.zero_grad()
        (F.cross_entropy if loss is None else loss)(model(x[j].to(dtype)).double(), y[j]).backward()
        for s,p in zip(sums, model.parameters()): s += p.grad.double()*w
        W += w
    return [s/W for s in sums]

def ulps(a, exact):
    "The largest distance of `a` from `exact`, in units in the last place of the dtype of `a` at the exact value"
    info,res = torch.finfo(a.dtype),exact.abs()
    ulp = torch.maximum(torch.exp2(torch.floor(torch.log2(res.clamp(min=info.tiny))))*info.eps, torch.tensor(info.smallest_normal*info.eps, dtype=torch.float64))
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
    "No low-precision gradient is there when the next micro-batch begins, and when one is added the ones before are gone"
    left = []
    def look(cb): left.append([p.grad is None for p in cb.model.parameters()]) if cb.training and cb.accumulate_step.window.n_micro>1 else None
    learn = low_learner(dtype, 8, [AccumulateStep(4), GradAccumDtype(), Callback(before_batch=look, after_backward=look)])
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

def is_clean(learn):
    assert not any(p._post_accumulate_grad_hooks for p in learn.model.parameters())
    assert not learn.grad_accum_dtype.hooked and not learn.accumulate_step.window.sums

@pytest.mark.parametrize('exc', [KeyboardInterrupt, OSError, CancelTrainException, CancelEpochException, CancelFitException, CancelBatchException])
@pytest.mark.parametrize('event', ['before_batch','before_backward','after_backward','before_step','after_step','after_batch'])
def test_nothing_is_left(event, exc):
    "However a fit ends, no hook and no sum is left, and what follows is what follows without the callback"
    if exc is CancelBatchException and event=='after_batch': exc = CancelTrainException   # `after_batch` is outside what that one cancels
    def stop(cb):
        if cb.training and cb.epoch==0 and cb.iter==stop.at: raise exc('stopped')
    def train(cbs):
        stop.at = 3 if event in ('before_step','after_step') else 5
        learn = make_learner(make_dls(76, 8, shuffle=False), cbs=[AccumulateStep(4), *cbs])
        with suppress(KeyboardInterrupt, OSError): learn.fit(1, cbs=Callback(**{event:stop}))
        if cbs: is_clean(learn)
        learn.spy.steps = []
        learn.fit(1)
        return learn
    assert_same(train([GradAccumDtype()]), train([]))

def test_with_the_rest(tmp_path):
    "`lr_find`, the patch, unfreezing in the middle of an epoch, micro-batches that are left out"
    def unfreeze(cb):
        if cb.training and cb.epoch==0 and cb.iter==2: cb.learn.unfreeze()
    def leave_out(cb):
        if cb.training and cb.iter in (1,7): cb.accumulate_step.drop()
    def train(cbs):
        learn = make_learner(make_dls(76, 8), path=tmp_path, cbs=[Callback(before_batch=unfreeze), Callback(after_loss=leave_out), *cbs])
        learn.freeze()
        with accumulation(4):
            learn.fit(2)
            learn.lr_find(num_it=10, show_plot=False, suggest_funcs=None)
        return learn
    assert_same(train([GradAccumDtype()]), train([]))

def test_sparse():
    "Sparse gradients are summed as they are"
    class Bag(nn.Module):
        def __init__(self): super().__init__(); torch.manual_seed(0); self.emb,self.lin = nn.Embedding(20, 6, sparse=True),nn.Linear(6,3)
        def forward(self, x): return self.lin(self.emb(x).mean(1))
    def train(bs, cbs):
        dls = make_dls(60, bs, x=torch.randint(20, (60,3), generator=torch.Generator().manual_seed(0)), shuffle=False)
        learn = make_learner(dls, Bag().double(), splitter=trainable_params, opt_func=partial(OptimWrapper, opt=torch.optim.SGD), cbs=cbs)
        learn.remove_cb(Spy)
        learn.fit(1)
        return [p.detach() for p in learn.model.parameters()]
    assert rel(train(8, [AccumulateStep(4), GradAccumDtype()]), train(32, []))[0] <= TOL

def test_deepcopy_inside(tmp_path):
    copies = []
    def copy(cb):
        if cb.training and cb.iter==1: copies.append((deepcopy(cb.learn.model), pickle.dumps(cb.learn.model)))
    learn = make_learner(make_dls(60, 8), cbs=[AccumulateStep(4), GradAccumDtype(), Callback(after_backward=copy)])
    learn.fit(1)
    assert copies and not any(p._post_accumulate_grad_hooks for p in copies[0][0].parameters())

@pytest.mark.parametrize('v', [32, 'float32', torch.int32, None])
def test_bad_dtype(v):
    with pytest.raises(ValueError, match='GradAccumDtype: dtype must be a floating dtype such as torch.float32, got'): GradAccumDtype(v)

def test_old_pytorch(monkeypatch):
    monkeypatch.delattr(Tensor, 'register_post_accumulate_grad_hook')
    with pytest.raises(RuntimeError, match='GradAccumDtype: PyTorch 2.1 or later is needed'): GradAccumDtype()

def test_needs_accumulate_step():
    with pytest.raises(ValueError, match='GradAccumDtype: the learner has no AccumulateStep'): make_learner(make_dls(60, 8), cbs=GradAccumDtype()).fit(1)

def test_peak_memory():
    "The sums in float32 come on top of a plain run's gradients, minus those: 4 bytes a parameter for 2. If both were kept it would be 6"
    n,d = 8,256
    def train(cbs):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(d, d, bias=False) for _ in range(n)]).to(torch.bfloat16)
        batches = [(torch.randn(2,d).bfloat16(), torch.randn(2,d).bfloat16()) for _ in range(8)]
        learn = Learner(DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None)), model, loss_func=nn.MSELoss(), opt_func=SGD,
                        default_cbs=False, cbs=[TrainEvalCallback(), AccumulateStep(4), *cbs])
        return peak_bytes(lambda: learn.fit(1))/(n*d*d)
    plain,summed = train([]),train([GradAccumDtype()])
    assert plain==pytest.approx(2, rel=.3)
    assert 3.5 < summed-plain+2 < 4.5, (plain, summed)
