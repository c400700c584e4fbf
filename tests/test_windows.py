"""The plan of windows by itself, for any loader; trainings that follow it: of any window, against the large batch, and
on a schedule, against a loop by hand whose batches end at the same samples; and the steps that it promises."""
import pytest
from hypothesis import given,settings,strategies as st
from contextlib import nullcontext
from nets import *
from fastai_accum import processes as module
from fastai_accum.windows import Windows
import fastai_accum.extras   # the plot

# ---- the plan

class Loader:
    "Says that it has `n` samples in batches of `bs`, and yields batches of `sizes`, each of which is its own size"
    def __init__(self, sizes, n, bs, drop_last): store_attr()
    def __len__(self): return self.n//self.bs if self.drop_last else -(-self.n//self.bs)
    def __iter__(self): return iter(self.sizes)

@each(says=[True,False], by_samples=[False,True], drop_last=[None,False,True])
def test_a_plan_and_what_comes(says, by_samples, drop_last):
    "Of loaders that do as they say, and of others; each batch comes once, and what is dropped is drawn"
    for seed in range(100):
        rng = random.Random(seed)
        bs,n,first_size,then = (rng.randint(*o) for o in ((1,9),(9,60),(1,12),(1,30)))
        dl = Loader([], n, bs, rng.random()<.5)
        dl.sizes = ([bs]*(n//bs)+[n%bs]*(n%bs>0))[:len(dl)]
        if not says: dl.sizes = [rng.randint(1, bs) for _ in range(rng.randint(1, 2*len(dl)))]
        def size(share): return first_size if share<.5 else then
        ws,drawn,ends,shares = Windows(dl, size, noop, by_samples, drop_last),0,[],[]
        drops = dl.drop_last if drop_last is None else drop_last
        for i,w in enumerate(ws):
            bs_here,n_here,lasts = zip(*w)
            got,want = [n if by_samples else 1 for n in n_here],size(min(1., drawn/len(dl)))
            assert bs_here==n_here==tuple(dl.sizes[drawn:drawn+len(got)]) and sum(got[:-1])<want
            assert ws.is_full==(sum(got)>=want) and (ws.is_full or ws.n_drawn==len(dl.sizes))
            assert ws.is_full or not drops or not any(lasts)
            assert not says or lasts==(False,)*(len(got)-1)+(True,)   # a dropped tail does not begin
            drawn += len(got)
            ends.append(drawn)
            shares.append(ws.share_after(i))
        left = sum(dl.sizes[drawn:]) if by_samples else len(dl.sizes)-drawn
        assert (ws.n_drawn,ws.n_samples)==(len(dl.sizes),sum(dl.sizes))
        assert not left or drops and (not says or left<size(drawn/len(dl)))
        if not says: continue
        assert ws.ends==ends and len(ws)==len(ends)
        assert shares==[*(o/len(dl) for o in ends[:-1]), *[1.]*bool(ends)]

# ---- any window, against the large batch

opts = dict(sgd=SGD, momentum=partial(SGD, mom=.9), adam=Adam, radam=RAdam, qhadam=QHAdam, lamb=Lamb, larc=Larc,
            rmsprop=RMSProp, ranger=ranger, torch_adamw=partial(OptimWrapper, opt=torch.optim.AdamW),
            torch_sgd=partial(OptimWrapper, opt=torch.optim.SGD))
# each of three epochs
fits = dict(twice=lambda l: (l.fit_one_cycle(2), l.fit(1)), flat_cos=lambda l: l.fit_flat_cos(3),
            sgdr=lambda l: l.fit_sgdr(2, 1), fine_tune=lambda l: l.fine_tune(2, base_lr=.02),
            positional=lambda l: l.fit(3, .01, .1, None, True))

def check(opt, fit, bs, n, window, drop=False, skip=(), weight=None, ignored=0., patched=False):
    "A fit in windows is that with the large batch, if this has targets in each batch"
    size = window.get('n_step') or -(-window['n_samples']//bs)
    if drop and n<bs*size: return   # never a step: an error, tested elsewhere
    y = torch.where(torch.rand(n, generator=torch.Generator().manual_seed(n))<ignored, -100, classes(n))
    nans = []   # of windows without targets, where the large batch steps on NaN
    def note(cb): nans.append(cb.training and cb.loss.isnan().item())
    def train(b, cb):
        learn = make_learner(make_dls(n, b, y=y, drop_last=drop, skip=skip), cbs=cb, opt_func=opts[opt],
                             loss_func=nn.CrossEntropyLoss(weight=weight))
        learn.planned = None if skip else learn.n_steps(3)
        fits[fit](learn)
        return learn
    with accumulation(**window) if patched else nullcontext():
        a = train(bs, None if patched else AccumulateStep(**window))
    b = train(bs*size, Callback(after_loss=note))
    if b.spy.steps and not any(nans):
        assert_same(a, b)
        assert skip or all(l.planned==len(l.spy.steps) for l in (a,b))
    c = a.accumulate_step.counts
    assert not patched or a.accumulate_step.learn is None and a.cbs.map(type)==b.cbs.map(type)[:-1]
    assert c.n_samples==c.n_stepped+c.n_thrown==sum(c.sizes)+c.n_thrown and (drop or any(nans) or not c.n_thrown)

@settings(max_examples=600 if SWEEP else 80, deadline=None, derandomize=not SWEEP)
@given(st.data())
@pytest.mark.filterwarnings('ignore')
def test_any_window(data):
    """Any batch size, window in micro-batches or samples, length, skipped items, share of ignored targets, weights,
    either rule for the tail; any optimizer and way to train; and with the callback, or for every learner"""
    def draw(*args): return data.draw(*args)
    bs,n,drop = draw(st.integers(1,9)),draw(st.integers(1,60)),draw(st.booleans())
    window = dict(n_step=draw(st.integers(1,6))) if draw(st.booleans()) else dict(n_samples=draw(st.integers(1,40)))
    skip = set() if drop else draw(st.sets(st.integers(0,n-1), max_size=n-1))
    weight = torch.tensor(draw(st.lists(st.floats(.01,100), min_size=3, max_size=3))).double()
    ways = draw(st.sampled_from([*opts])),draw(st.sampled_from([*fits]))
    check(*ways, bs, n, window, drop, skip, weight, draw(st.floats(0,.9)), draw(st.booleans()))

# ---- schedules

cosine = SchedCos(.05, .001)
combined = combine_scheds([.5,.5], [SchedNo(2,2),SchedNo(5,5)])

def windows(n, f, n_epoch=3, by_samples=False, drop_last=False, bs=8):
    "Where the windows of each epoch begin and end, in samples, with the `pct` of each"
    res = []
    for epoch in range(n_epoch):
        i = 0
        while i<n:
            pct = (epoch + (i//bs)/-(-n//bs))/n_epoch   # in batches
            size = -(-f(pct)//bs)*bs if by_samples else f(pct)*bs
            j = min(i+size, n)
            full = j-i>=f(pct) if by_samples else -(-(j-i)//bs)==f(pct)
            if full or not drop_last: res.append((epoch,i,j,pct))
            i = j if full else n
    return res

def by_hand(n, planned, loss_func):
    "The learner, and the loss and the rate of each step"
    x,y,rows = features(n),classes(n),[]
    learn = make_learner(make_dls(n, 8))
    learn.create_opt()
    for _,i,j,pct in planned:
        learn.opt.set_hyper('lr', cosine(pct))
        loss = loss_func(learn.model(x[i:j]), y[i:j])
        loss.backward(); learn.opt.step(); learn.opt.zero_grad()
        rows.append((loss.item(), cosine(pct)))
    return learn,rows

def ours(n, *cbs, loss_func=None, n_epoch=3, lr=cosine, drop_last=False):
    learn,rows = make_learner(make_dls(n, 8, shuffle=False, drop_last=drop_last), loss_func=loss_func),[]
    def row(cb): return rows.append((cb.loss.item(), cb.opt.hypers[-1]['lr'])) if cb.training else None
    learn.add_cbs([*cbs, Callback(after_batch=row)])
    learn.planned = learn.n_steps(n_epoch)
    learn.fit(n_epoch, cbs=ParamScheduler({'lr':lr}))
    return learn,rows

ways = dict(grows=dict(n_step=grows), combined=dict(n_step=combined),
            numpy=dict(n_step=lambda pct: np.int64(grows(pct))),
            samples=dict(n_samples=lambda pct: 8 if pct<.3 else 20 if pct<.7 else 44))

@each(10, n=[96,100,76], way=ways, drop_last=[False,True], how=['callback','slices','patch'],
      loss_func=[nn.CrossEntropyLoss(),nn.CrossEntropyLoss(weight=torch.tensor([1.,10.,3.]).double())])
def test_as_by_hand(n, way, drop_last, how, loss_func):
    "Losses, rates, weights and sizes; `n_iter` is known, and the schedule reaches its end"
    planned = windows(n, *ways[way].values(), by_samples=way=='samples', drop_last=drop_last)
    kw,seen = dict(ways[way], drop_last=drop_last),{}
    def look(cb): return seen.setdefault((cb.epoch, cb.n_iter), 1) if cb.training else None
    cbs = [AccumulateStep(**kw)]*(how!='patch')+[MicroBatch(3)]*(how=='slices')
    with accumulation(**kw) if how=='patch' else nullcontext():
        # `drop_last` against the loader's own, which leaves out no batch of 96 samples
        a,got = ours(n, *cbs, Callback(before_batch=look), loss_func=loss_func, drop_last=not drop_last and n==96)
    b,rows = by_hand(n, planned, loss_func)
    close([weights(a), opt_state(a.opt), got], [weights(b), opt_state(b.opt), rows])
    c = a.accumulate_step.counts
    assert c.sizes==[j-i for _,i,j,_ in planned] and len(rows)>4 and c.n_thrown==3*n-sum(c.sizes)
    assert [*seen]==[(e, len([w for w in planned if w[0]==e])) for e in range(3)]
    assert a.pct_train==1 and a.train_iter==len(planned)==c.n_steps==a.planned

def test_what_f_is_asked():
    "The `pct` that the learning rate schedule gets, to the last bit"
    asked,wanted = [],[]
    def lr(pct): asked.append(pct); return .01
    def f(pct): wanted.append(pct); return grows(pct)
    ours(100, AccumulateStep(f), lr=lr)
    assert len(set(asked))>9 and set(asked)<=set(wanted)

def test_n_epoch_is_lowered_in_the_middle():
    "fastai goes on with all epochs; `f` is asked for 1 at most"
    asked = []
    def f(pct): asked.append(pct); return grows(pct)
    def lower(cb):
        if cb.epoch==1: cb.learn.n_epoch = 2
    make_learner(make_dls(96, 8), cbs=[AccumulateStep(f), Callback(before_epoch=lower)]).fit(4)
    assert max(asked)==1

def test_plot_windows():
    import matplotlib; matplotlib.use('agg')
    def lines(learn):
        learn.recorder.plot_windows()
        return [ax.lines[0].get_xydata() for ax in plt.gcf().axes]
    learn = make_learner(make_dls(96, 8))
    def no_windows(): return pytest.raises(ValueError, match='the last fit did not train in windows')
    with no_windows(): lines(learn)
    with accumulation(n_step=grows): learn.fit(2)
    assert len(lines(learn))==3 and lines(learn)[0][0,0]==0 and [ax.get_title() for ax in plt.gcf().axes]==[
        'learning rate','effective batch, in samples','steps so far']
    learn.fit(3)
    with no_windows(): lines(learn)
    rate,_,steps = lines(ours(100, AccumulateStep(grows), n_epoch=2)[0])
    assert rate[-1,0]==200 and steps[-1,1]==len(windows(100, grows, 2))
    rate,*_ = lines(ours(100, AccumulateStep(lambda p: 5, drop_last=True))[0])
    assert rate[-1,0]==3*80   # without the tails
    lines(ours(96, AccumulateStep(grows), raising(CancelFitException, 'after_batch', lambda cb: cb.train_iter>=5))[0])
    assert lines(ours(96, MicroBatch(4), n_epoch=1)[0])[1][:,1].tolist()==[8]*13
    leave_out = raising(CancelBatchException, 'before_batch', lambda cb: cb.train_iter==1)
    _,sizes,steps = lines(ours(96, AccumulateStep(4), leave_out, n_epoch=1)[0])
    assert sizes[:,1].tolist()==[32,0,32,32] and steps[-1,1]==2

# ---- `learn.n_steps`: how many there will be; trainings above compare it with what comes

def test_accumulation_for_every_learner():
    "What is turned on counts, unless the learner has an `AccumulateStep` of its own, even one that is off"
    cbs = None,AccumulateStep(2),AccumulateStep(2),MicroBatch(3)
    plain,own,off,cut = (make_learner(make_dls(64, 8), cbs=cb) for cb in cbs)
    off.accumulate_step.run = False
    with accumulation(4):
        for o,n in (plain,2),(own,4),(off,8),(cut,2):
            assert o.n_steps()==n
            o.fit(1)
            assert len(o.spy.steps)==n
    assert plain.n_steps()==cut.n_steps()==8

four = AccumulateStep(4)
@each(case=[
    (lambda: of_batches([(features(5), classes(5))]*4), AccumulateStep(n_samples=8), 'no batch size.*n_samples=8.*use'),
    (lambda: make_dls(76, 8), GradientAccumulation(32), "fastai's GradientAccumulation.*use AccumulateStep"),
    (lambda: None, None, 'no training loader'), (DataLoaders, None, 'no training loader'),
    *((lambda: make_dls(76, 8), [*L(acc),cb], f'{type(cb).__name__}.*nobody knows')
      for cb in (ShortEpochCallback(.5, short_valid=False), SkipToEpoch(1)) for acc in (None,four)),
    *((lambda skip=skip: make_dls(64, 8, skip=skip), four, 'items of the loader raise SkipItemException')
      for skip in (range(0, 64, 2), range(32, 64), [0], [63]))])
def test_what_cannot_be_known(case):
    "A few items may be loaded, and random numbers are as before"
    dls,cbs,match = case
    learn = Learner(dls(), small_model(), nn.MSELoss(), cbs=cbs)
    was = torch.get_rng_state(),random.getstate()
    with pytest.raises(ValueError, match=f'n_steps: .*{match}'): learn.n_steps(2)
    assert identical(was, (torch.get_rng_state(),random.getstate()))
    with pytest.raises(ValueError, match='n_epoch must be an int of at least 1, got 0'): learn.n_steps(0)

def test_several_processes(monkeypatch):
    "Before a fit in `distrib_ctx`, the loader is not yet cut; its windows of samples are filled by all processes"
    distributed = pytest.importorskip('fastai.distributed')
    class DistributedTrainer(Callback): "As fastai's, which needs a process group"
    for o in module,distributed: monkeypatch.setattr(o, 'num_distrib', lambda: 2)
    for way,n in (AccumulateStep(2),3),(AccumulateStep(n_samples=32),3),(None,5):
        learn = make_learner(make_dls(76, 8), cbs=L(way)+[DistributedTrainer()])   # 10 batches, 5 for each
        assert learn.n_steps()==n

def test_a_stream_of_known_length():
    "It has no items to look at, and as many steps as its `n` says"
    dls = DataLoaders(*[DataLoader(Stream(), bs=4, n=64) for _ in range(2)])
    learn = make_learner(dls, cbs=[NoValid(), AccumulateStep(4)])
    assert learn.n_steps(2)==8
    learn.fit(2)
    assert len(learn.spy.steps)==8
