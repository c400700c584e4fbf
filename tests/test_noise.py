"""`learn.noise_scale()`: its sums against gradients that are stored, its estimate against a population whose scale is
known, and what it says"""
import pytest
import matplotlib; matplotlib.use('agg')
from nets import *
from fastai_accum.extras import *
from fastai_accum.loop import in_charge
from fastai_accum.loss import loss_weight
from fastai_accum.know.noise import *

noise_scale = partial(Learner.noise_scale, show_plot=False)
few = partial(noise_scale, n_step=2, num_it=6)   # of 12 batches

# for each window: weight, gradient and samples of each micro-batch; a list of a callback would be set back
stored = []

class Store(Callback):
    "Keeps the gradients of copies of the model"
    run_valid = False
    win = None
    def after_loss(self):
        acc,model = in_charge(self.learn),deepcopy(self.model)
        for p in model.parameters(): p.grad = None
        w = float((acc.weight or partial(loss_weight, self.loss_func))(self.learn.pred, *self.learn.yb))
        if acc.window is not self.win: self.win = acc.window; stored.append([])
        self.loss_func(model(*self.learn.xb), *self.learn.yb).backward()
        by = w if getattr(self.loss_func, 'reduction', 'mean')=='sum' else 1
        gs = [(torch.zeros_like(p) if p.grad is None else p.grad.to_dense()).flatten()/by for p in model.parameters()]
        stored[-1].append((w, torch.cat(gs).nan_to_num(), find_bs(self.learn.xb)))

def estimate(windows):
    "The noise of a sample, and the squared gradient"
    rows = []
    for o in windows:
        ws,gs,_ = zip(*(m for m in o if m[0]))
        mean = sum(w*g for w,g in zip(ws, gs))/sum(ws)
        rows.append(unbiased(len(ws), sum(ws), sum(w*(g@g).item() for w,g in zip(ws, gs)), (mean@mean).item()))
    weight,n = np.sum([(w,k) for o in windows for w,_,k in o], axis=0)
    return np.mean(rows, axis=0)*[n/weight,1]

def uneven(y):
    "16 micro-batches of any size"
    at = np.cumsum([0,*(7,3,11,2,5,9,1,4)*2])
    batches = [(features(84)[a:b], y[a:b]) for a,b in zip(at, at[1:])]
    return of_batches(batches, batches[:1])

def odd():
    "A sparse gradient, and a branch without a gradient in most micro-batches"
    def f(m, x):
        h = m.emb((x.abs()*4).long().clamp(max=8)).mean(1)
        return m.a(h)+m.b(h) if (x[:,0]>2.).any() else m.a(h)
    return Made(f, emb=nn.Embedding(9, 4, sparse=True), a=nn.Linear(4, 3), b=nn.Linear(4, 3)).double()

i,weighted = torch.arange(84),nn.CrossEntropyLoss(weight=torch.tensor([1.,10.,3.]).double())
cases = dict(
    ignored    = dict(y=torch.where((i%9<4)|((i>=7)&(i<10)), -100, classes(84))),   # 7 to 9 are a micro-batch
    own_weight = dict(cbs=AccumulateStep(1, weight=lambda pred, y: len(y)**2)),
    sums       = dict(cbs=AccumulateStep(1, average=False)),
    sum_loss   = dict(cbs=AccumulateStep(1, average=False), loss_func=nn.CrossEntropyLoss(reduction='sum')),
    slices     = dict(cbs=MicroBatch(3)),
    coupled    = dict(cbs=MicroBatch(3, coupled=True)),
    exact      = dict(cbs=MicroBatch(3, exact=True)),
    scaled     = dict(cbs=OnCpu(init_scale=2.**10, growth_interval=2)),
    clipped    = dict(cbs=GradientClip(1e-3)),
    dtype      = dict(cbs=[AccumulateStep(1),GradAccumDtype(torch.float64)], loss_func=weighted),
    odd        = dict(model=odd, opt_func=partial(SGD, mom=0), **one_group))

@each(name=cases)
def test_sums(name):
    "The estimate is that of gradients that are stored"
    kw = {**dict(y=classes(84), model=small_model, cbs=None), **cases[name]}
    y,model,cbs = map(kw.pop, ('y','model','cbs'))
    stored.clear()
    found = noise_scale(make_learner(uneven(y), model(), cbs=[*L(deepcopy(cbs)), Store()], **kw), n_step=4, num_it=6)
    assert len(stored)==6
    close([found.noise,found.grad_sq], list(estimate(stored)), 1e-9)

def regression(n=4000, d=10):
    "A learner of a linear regression; the page compares one with its population"
    x = features(n, d)
    dl = DataLoader(list(zip(x, x@features(d, 1, 1) + 3*features(n, 1, 2))), bs=8, shuffle=True)
    torch.manual_seed(0)
    model = nn.Linear(d, 1, bias=False).double()
    return partial(make_learner, DataLoaders(dl, dl), model, nn.MSELoss(), splitter=trainable_params)

def test_the_plot():
    found = regression()().noise_scale(n_step=4, num_it=125)
    assert found.low<found.scale<found.high
    assert found.scale==pytest.approx(found.noise/found.grad_sq) and found.n_step==round(found.scale/8)
    line,suggested = plt.gca().lines   # of the plot
    assert type(plt.gca().yaxis.get_major_formatter()).__name__=='LogFormatter'   # 60, not 6×10¹
    assert line.get_ydata()[-1]==pytest.approx(found.scale) and suggested.get_ydata()[0]==8*found.n_step
    plt.close('all')

def test_interval():
    "A denominator whose interval reaches 0 gives none; the page has how often it holds the true ratio"
    from scipy import stats
    a,b = np.random.default_rng(0).multivariate_normal([6,2], [[9,3],[3,4]], 40).T
    low,_ = stats.ttest_1samp(b, 0).confidence_interval(.95)
    for o,is_nan in ((b-1.001*low,True),(b-.999*low,False),(-b,True)):
        assert all(math.isnan(v)==is_nan for v in ratio_interval(a, o))
    assert math.isnan(ratio_interval(a[:1], b[:1])[0])

# ---- what it says

def test_the_suggestion_counts_batches_of_the_loader(capsys):
    make = regression()
    def find(cbs=()):
        random.seed(0)
        return noise_scale(make(cbs=cbs), num_it=10),capsys.readouterr().out
    plain,_ = find()
    weighs = MicroBatch(2, weight=lambda p,y: len(y))
    for cbs in AccumulateStep(5),AccumulateStep(n_samples=100),MicroBatch(2),weighs:
        res,said = find(cbs)
        assert res.n_step==round(res.scale/8)
        assert f'`learn.accumulate({res.n_step})` makes steps of {8*res.n_step} samples' in said, said
    with accumulation(6): assert find()[0]==plain

def test_at_most_four_epochs_and_a_sign_of_life(capsys):
    stored.clear()
    noise_scale(make_learner(make_dls(96, 8), cbs=Store()).add_cb(ProgressCallback()), n_step=3)
    said = capsys.readouterr().out
    assert len(stored)==16 and 'noise_scale, about' in said and 'Epoch' not in said

def filled(o, value=0., **kwargs):
    learn = make_learner(make_dls(96, 8, **kwargs))
    with torch.no_grad():
        for p in learn.model[o].parameters(): p.fill_(value)
    return learn

def test_what_cannot_be_measured(monkeypatch, capsys):
    res = few(filled(2, y=classes(96, seed=5)))   # equal predictions, and targets that tell nothing
    assert math.isnan(res.scale) and res.n_step is None and res.noise>0
    assert 'The noise hides the gradient in the 96 samples that were drawn' in capsys.readouterr().out
    learn = make_learner(make_dls(248, 8))
    for kw in dict(n_step=1), dict(n_step=2.), dict(num_it=True), dict(num_it=1):
        with pytest.raises(ValueError, match=f'noise_scale: {first(kw)} must be an int of at least 2, got '):
            learn.noise_scale(**kw)
    says = 'an epoch has 31 batches, too few .* needs 32 or more. Take more data, or a'
    with pytest.raises(ValueError, match=says) as e: noise_scale(learn)   # before anything runs
    assert not re.search('n_step|num_it', str(e.value)) and learn.opt is None
    with pytest.raises(ValueError, match='nothing was measured'): few(filled(0, math.nan))
    normed = make_learner(make_dls(96, 8), nn.Sequential(nn.BatchNorm1d(6), small_model()).double())
    with pytest.warns(UserWarning, match='noise_scale: .*batch norm.*BatchNormEval'): few(normed)
    for cb in BatchNormEval(),Callback(before_train=lambda cb: cb.model[0].eval()):
        with normed.added_cbs(cb),warnings.catch_warnings(action='error'): few(normed)
    monkeypatch.setitem(inspect.unwrap(Learner.noise_scale).__globals__, 'num_distrib', lambda: 2)
    with pytest.raises(RuntimeError, match='noise_scale: call it in one process'): few(learn)

def test_a_scaler_backs_off():
    "An overflow leaves a window out, and the scaler finds its scale"
    dls = DataLoaders.from_dsets(*[list(zip(features(96).float(), classes(96)))]*2, bs=8, device='cpu')
    cbs = OnCpu(torch.float16, init_scale=2.**20),None
    a,b = (noise_scale(Learner(dls, small_model().float(), nn.CrossEntropyLoss(), cbs=o).remove_cb(ProgressCallback),
                       n_step=3).noise for o in cbs)
    assert not hasattr(cbs[0], 'autocast') and a==pytest.approx(b, rel=.2)
