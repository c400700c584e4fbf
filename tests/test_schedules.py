"""Windows on a schedule, against a loop by hand over batches whose size changes at the same samples."""
import pytest
from nets import *
import fastai_accum.extras   # the plot

cosine = SchedCos(.05, .001)
W = torch.tensor([1.,10.,3.]).double()

def windows(n, n_epoch, f, by_samples=False, drop_last=False, bs=8):
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

def by_hand(n, f, loss_func=nn.CrossEntropyLoss(), **kwargs):
    "The learner, and the loss, the rate and the samples of each step"
    x,y,rows = features(n),classes(n),[]
    learn = make_learner(make_dls(n, 8))
    learn.create_opt()
    for _,i,j,pct in windows(n, 3, f, **kwargs):
        learn.opt.set_hyper('lr', cosine(pct))
        loss = loss_func(learn.model(x[i:j]), y[i:j])
        loss.backward(); learn.opt.step(); learn.opt.zero_grad()
        rows.append((loss.item(), cosine(pct), j-i))
    return learn,rows

def ours(n, *cbs, loss_func=None, drop_last=False, n_epoch=3, lr=cosine):
    learn,rows = make_learner(make_dls(n, 8, shuffle=False, drop_last=drop_last), loss_func=loss_func),[]
    def row(cb): return rows.append((cb.loss.item(), cb.opt.hypers[-1]['lr'])) if cb.training else None
    learn.add_cbs([*cbs, Callback(after_batch=row)])
    learn.fit(n_epoch, cbs=ParamScheduler({'lr':lr}))
    return learn,rows

def matches(ours, hand):
    (a,got),(b,rows) = ours,hand
    close([weights(a), opt_state(a.opt), got], [weights(b), opt_state(b.opt), [r[:2] for r in rows]])
    assert len(rows)>4 and a.accumulate_step.counts.sizes==[r[2] for r in rows]

combined = combine_scheds([.5,.5], [SchedNo(2,2),SchedNo(5,5)])

@each(4, n=[96,100,76], f=[grows,combined], loss_func=[nn.CrossEntropyLoss(),nn.CrossEntropyLoss(weight=W)])
def test_as_by_hand(n, f, loss_func):
    hand = by_hand(n, f, loss_func)
    for cbs in [AccumulateStep(f)],[AccumulateStep(f),MicroBatch(3)]: matches(ours(n, *cbs, loss_func=loss_func), hand)
    with accumulation(n_step=f): matches(ours(n, loss_func=loss_func), hand)

def test_tail_is_dropped():
    a = ours(96, AccumulateStep(lambda pct: np.int64(grows(pct)), drop_last=True))
    b = by_hand(96, grows, drop_last=True)
    matches(a, b)
    assert a[0].accumulate_step.counts.n_thrown==3*96-sum(r[2] for r in b[1])>0

@each(n=[96,100])
def test_samples(n):
    def f(pct): return 8 if pct<.3 else 20 if pct<.7 else 44
    matches(ours(n, AccumulateStep(n_samples=f)), by_hand(n, f, by_samples=True))

@each(2, kw=[dict(n_step=grows), dict(n_samples=lambda pct: 8*grows(pct))], drop_last=[False,True])
def test_schedule_reaches_its_end_and_n_iter_is_known(kw, drop_last):
    seen = []
    look = Callback(before_batch=lambda cb: seen.append((cb.epoch,cb.n_iter)) if cb.training else None)
    a,_ = ours(100, AccumulateStep(**kw, drop_last=drop_last), look)
    made = [len([w for w in windows(100, 3, grows, drop_last=drop_last) if w[0]==e]) for e in range(3)]
    assert [dict(seen)[e] for e in range(3)]==made and len(set(seen))==3
    assert a.pct_train==1 and a.train_iter==sum(made)==a.accumulate_step.counts.n_steps

def test_what_f_is_asked():
    "The `pct` that the learning rate schedule gets, to the last bit"
    asked,wanted = [],[]
    def lr(pct): asked.append(pct); return .01
    def f(pct): wanted.append(pct); return grows(pct)
    ours(100, AccumulateStep(f), lr=lr)
    assert len(set(asked))>9 and set(asked)<=set(wanted)

def test_lr_find_takes_the_first_value(tmp_path):
    def found(n_step):
        learn = make_learner(make_dls(96, 8, shuffle=False), cbs=AccumulateStep(n_step), path=tmp_path)
        learn.lr_find(num_it=7, show_plot=False, suggest_funcs=())
        return learn
    a,b = found(lambda pct: 3 if pct==0 else 5),found(3)
    assert_same(a, b)
    assert len(a.recorder.losses)==7

@each(v=[0, -1, 2.5, 2., True, None, '3'])
def test_bad_value_of_a_schedule(v):
    "It raises before the first step, wherever it is"
    learn = make_learner(make_dls(96, 8), cbs=AccumulateStep(lambda pct: 2 if pct<.5 else v))
    says = rf"n_step at pct=0\.5 must be an int of at least 1 .*, got {v!r}"
    with pytest.raises(ValueError, match=says): learn.fit(2)
    assert not getattr(learn.spy, 'steps', [])

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
    assert rate[-1,0]==200 and steps[-1,1]==len(windows(100, 2, grows))
    rate,*_ = lines(ours(100, AccumulateStep(lambda p: 5, drop_last=True))[0])
    assert rate[-1,0]==3*80   # without the tails
    def stop(cb):
        if cb.train_iter>=5: raise CancelFitException
    lines(ours(96, AccumulateStep(grows), Callback(after_batch=stop))[0])
    assert lines(ours(96, MicroBatch(4), n_epoch=1)[0])[1][:,1].tolist()==[8]*13
    def leave_out(cb):
        if cb.training and cb.train_iter==1: raise CancelBatchException
    _,sizes,steps = lines(ours(96, AccumulateStep(4), Callback(before_batch=leave_out), n_epoch=1)[0])
    assert sizes[:,1].tolist()==[32,0,32,32] and steps[-1,1]==2
