"What measures, checks and helps: a few strong cases each; the rest is in `corners`, in files named after the modules"
import pytest
import matplotlib; matplotlib.use('agg')
from harness import *
import fastai_accum.all   # for `exact=True`
from fastai_accum.extras.batchnorm import *
from fastai_accum.extras.precision import *
from fastai_accum.know.noise import *
from fastai_accum.know.unchanged import unchanged
from fastai_accum.know.check import *
from fastai_accum.patch import accumulation

weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.,10.,3.]).double())

# ---- the noise scale

def test_noise_scale_is_that_of_the_population():
    "A linear regression, whose gradients are all known"
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 10, generator=g, dtype=torch.float64)
    y = x@torch.randn(10, 1, generator=g).double() + 3*torch.randn(4000, 1, generator=g).double()
    torch.manual_seed(0); model = nn.Linear(10, 1, bias=False).double()
    grads = 2*(model(x).detach()-y)*x
    noise = grads.var(0).sum().item()
    true = noise/(grads.mean(0).square().sum().item()-noise/4000)
    random.seed(0)
    dl = DataLoader(list(zip(x, y)), bs=8, shuffle=True)
    learn = make_learner(DataLoaders(dl, dl), model, nn.MSELoss(), splitter=trainable_params)
    found = learn.noise_scale(n_step=4, num_it=125, show_plot=False)
    assert found.low<true<found.high<3*found.low and found.n_step==round(found.scale/8)

def everything(learn):
    return [[p.detach().clone() for p in learn.model.parameters()], opt_state(learn.opt),
            [dict(h) for h in learn.opt.hypers],
            learn.recorder.losses, learn.recorder.values, torch.get_rng_state(), list(np.random.get_state()[1])]

def branch(learn):
    with unchanged(learn): learn.fit(1, cbs=AccumulateStep(2))

@pytest.mark.parametrize('stop', [None,KeyboardInterrupt])
@pytest.mark.parametrize('act', [Self.noise_scale(n_step=2, num_it=6, show_plot=False), branch],
                         ids=['noise_scale','branch'])
def test_trials_change_nothing(act, stop):
    "The learner is as it was, also after Ctrl-C; the next fit is the same"
    def at(cb):
        if stop and armed and cb.training and cb.micro.i==5: raise stop
    armed = False
    a,b = (make_learner(make_dls(92, 8), cbs=[AccumulateStep(3), Callback(after_backward=at)]) for _ in range(2))
    for l in (a,b): l.fit(1)
    before,drawn,armed = deepcopy(everything(a)),random.getstate(),True
    if stop:
        with pytest.raises(stop): act(a)
    else: act(a)
    armed = False
    close(everything(a), before, 0)
    assert random.getstate()==drawn
    for l in (a,b): random.setstate(drawn); l.fit(1)
    assert_same(a, b, 0)

# ---- sums in float32

class Low(Callback):
    "Inputs in the dtype of the model, and predictions in float64, so that the loss is exact"
    def before_batch(self): self.learn.xb = tuple(o.to(next(self.model.parameters()).dtype) for o in self.xb)
    def after_pred(self): self.learn.pred = self.pred.double()

def exact_gradient(dtype):
    "The mean gradient over 64 samples that go backward in `dtype` one by one, summed in float64"
    model = small_model().to(dtype)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for x,y in zip(features(64).to(dtype), classes(64)):
        model.zero_grad()
        F.cross_entropy(model(x[None]).double(), y[None]).backward()
        for s,p in zip(sums, model.parameters()): s += p.grad.double()/64
    return sums

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
def test_two_units_in_the_last_place(dtype):
    def error(*cbs):
        cbs = [Low(), AccumulateStep(64), *cbs]
        learn = make_learner(make_dls(64, 1, shuffle=False), small_model().to(dtype), opt_func=SGD, cbs=cbs)
        learn.fit(1)
        def ulps(a, b):
            info = torch.finfo(dtype)
            unit = torch.exp2(b.abs().clamp(min=info.smallest_normal).log2().floor())*info.eps
            return ((a.double()-b).abs()/unit).max().item()
        return max(map(ulps, learn.spy.steps[0]['grads'], exact_gradient(dtype)))
    assert error(GradAccumDtype())<=2<error()

@pytest.mark.parametrize('kw', [dict(), dict(drop_last=True), dict(loss_func=weighted)],
                         ids=['tail','dropped','weighted'])
def test_sums_of_float64_are_exact(kw): same(lambda: [AccumulateStep(4), GradAccumDtype()], **kw)

@pytest.mark.parametrize('event', ['before_batch','after_backward','before_step'])
@pytest.mark.parametrize('exc', [KeyboardInterrupt,CancelBatchException,CancelFitException])
def test_no_sums_are_left(exc, event):
    "However a fit ends, what follows is what follows without the callback"
    def train(*cbs):
        def stop(cb):
            if cb.training and cb.micro.i==(3 if event=='before_step' else 5): raise exc
        learn = make_learner(make_dls(76, 8, shuffle=False), cbs=[AccumulateStep(4), *cbs])
        try: learn.fit(1, cbs=Callback(**{event:stop}))
        except KeyboardInterrupt: pass
        assert not any(p._post_accumulate_grad_hooks for p in learn.model.parameters())
        learn.fit(1)
        return learn
    a = train(GradAccumDtype())
    assert_same(a, train())
    assert a.grad_accum_dtype.sums is None

# ---- schedules

def grows(pct): return 1 if pct<.3 else 3 if pct<.7 else 6

def test_schedule(f=grows, lr=SchedCos(.05,.001)):
    "The same as a loop by hand over batches whose size changes"
    b = make_learner(make_dls(100, 8), loss_func=weighted); b.create_opt()
    sizes,x,y = [],features(100),classes(100)
    for epoch in range(3):
        i = 0
        while i<100:
            pct = (epoch + (i//8)/13)/3   # in batches
            j = min(i+8*f(pct), 100)
            b.opt.set_hyper('lr', lr(pct))
            weighted(b.model(x[i:j]), y[i:j]).backward(); b.opt.step(); b.opt.zero_grad()
            sizes.append(j-i); i = j
    a = make_learner(make_dls(100, 8, shuffle=False), loss_func=weighted, cbs=AccumulateStep(f))
    a.fit(3, cbs=ParamScheduler({'lr':lr}))
    for get in (lambda l: [p.detach() for p in l.model.parameters()]),(lambda l: opt_state(l.opt)):
        close(get(a), get(b))
    assert a.accumulate_step.counts.sizes==sizes and a.pct_train==1
    a.recorder.plot_windows()
    rate,size,steps = (o.lines[0] for o in plt.gcf().axes)
    assert rate.get_xdata()[-1]==300 and size.get_ydata().tolist()[:-1]==sizes and steps.get_ydata()[-1]==len(sizes)
    plt.close('all')

@pytest.mark.parametrize('v', [0, 2., None])
def test_bad_value_of_a_schedule(v):
    "It raises before the first step, wherever it is"
    learn = make_learner(make_dls(96, 8), cbs=AccumulateStep(lambda pct: 2 if pct<.5 else v))
    with pytest.raises(ValueError, match='n_step.*an int of at least 1'): learn.fit(2)
    assert not hasattr(learn.spy, 'steps') or not learn.spy.steps

# ---- the check

def masked(p, y):
    m = y!=0
    return (F.cross_entropy(p, y, reduction='none')*m).sum()/m.sum()
def net(*ms): return nn.Sequential(nn.Linear(6,5), *ms, nn.Tanh(), nn.Linear(5,3)).double()
def learner(model=None, loss_func=None, cbs=None):
    return make_learner(make_dls(64, 8), model, loss_func, SGD, cbs)

def test_check_finds_the_causes():
    "Each remedy is tried, and the learner stays as it was"
    learn = learner(net(nn.BatchNorm1d(5), nn.Dropout()), masked, AccumulateStep(4))
    before = [[o.clone() for o in learn.model.state_dict().values()], torch.get_rng_state()]
    check = learn.check_accumulation()
    assert {o.kind:o.where for o in check.causes}=={'batch norm':'1', 'dropout':'2', 'loss':'masked'}
    close([list(learn.model.state_dict().values()), torch.get_rng_state()], before, 0)
    assert all('MicroBatch(bs=8, exact=True)' in o.remedy for o in check.causes[:2])
    assert check.causes[2].remedy=='AccumulateStep(n_step=4, weight=lambda pred, *yb: (yb[0]!=0).sum())'
    for mended in (learner(net(nn.BatchNorm1d(5), nn.Dropout()), masked, MicroBatch(4, exact=True)),
                   learner(None, masked, AccumulateStep(4, weight=lambda pred, *yb: (yb[0]!=0).sum()))):
        check = mended.check_accumulation()
        assert not check.causes and check.error<=TOL

def test_check_of_the_patch():
    "What is turned on for all learners is what is checked, and stays on"
    learn = learner(loss_func=masked)
    with accumulation(4):
        assert [o.kind for o in learn.check_accumulation().causes]==['loss']
        learn.fit(1)
    assert learn.accumulate_step.counts.n_steps==2

# ---- batch norm

def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6,16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16,3)).double()

def test_without_statistics_of_the_batch():
    "Exact, where batch norm is not"
    same(lambda: [AccumulateStep(4)], also=BatchNormEval, model=normed, splitter=trainable_params)
    a,b = pair(lambda: [AccumulateStep(4)], model=normed, splitter=trainable_params)
    assert worst(a, b, but='buffers')[0]>1e-3

