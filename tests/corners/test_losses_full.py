"Every loss of the registry, cut evenly and unevenly, windows without targets, MixUp, and any window"
import pytest
from functools import partial
from hypothesis import given,settings,strategies as st
from fastai.callback.mixup import MixHandler
from harness import *
from fastai_accum.loss import *
from test_losses import BS,N,W,W0,check,check_flat,flat,ignoring,losses,masked,pair,rare,real,some

@pytest.mark.parametrize('name', [o for o in losses if o not in some])
def test_other_losses(name): check(name)

@pytest.mark.parametrize('name', flat)
def test_all_flat_float32(name): check_flat(name)

sizes = dict(equal=[8,8,8,8], unequal=[28,1,1,2], zero=[16,0,8,8], zero_first=[0,16,8,8])

# torch's CTCLoss refuses an empty batch
@pytest.mark.parametrize('name,kind', [(n,k) for n in losses for k in sizes if not (n=='ctc' and 'zero' in k)])
def test_sizes(name, kind):
    """Every loss, in windows of 32 that are cut evenly, very unevenly, and with a micro-batch of nothing, whose mean
    is NaN"""
    loss,y,*model = losses[name]
    y = tuplify(y)
    def train(sizes, cb=None):
        cuts = np.cumsum([0]+sizes*2)
        batches = [(features(N)[a:b], *(o[a:b] for o in y)) for a,b in zip(cuts,cuts[1:])]
        learn = make_learner(make_dls(32, 8), (*model, small_model)[0](), loss_func=loss, splitter=trainable_params,
                             cbs=cb)
        learn.dls = DataLoaders(DataLoader(batches, bs=None),
                                DataLoader([(features(N)[:8], *(o[:8] for o in y))], bs=None))
        learn.dls.n_inp = 1
        learn.fit_one_cycle(2)
        return learn
    tol = 1e-5 if name.startswith('dice') else TOL   # DiceLoss computes in float32
    assert_same(train(sizes[kind], AccumulateStep(4)), train([32]), tol=tol)

empty = dict(
    ignored = (nn.CrossEntropyLoss(), torch.full((N,), -100)),
    smooth  = (nn.CrossEntropyLoss(label_smoothing=.1), torch.full((N,), -100)),
    weights = (nn.CrossEntropyLoss(weight=W0), torch.full((N,), 2)),
    masked  = (masked, (real(N,3),torch.zeros(N).double())),
    clamped = (lambda pred,targ,mask: (((pred-targ)**2).mean(1)*mask).sum()/mask.sum().clamp(min=1),
               (real(N,3),torch.zeros(N).double())),
)

@pytest.mark.parametrize('name', empty)
def test_window_of_weight_zero(name):
    "A whole window of weight 0 makes no step, and the one after it is that of the large batch from there"
    loss,y = empty[name]
    y = tuple(o.clone() for o in tuplify(y))
    good = dict(masked=1., clamped=1.).get(name, 1)
    y[-1][32:64] = good
    window = dict(n_step=4, weight=(lambda pred,targ,mask: mask.sum()) if len(y)>1 else None)
    def leave_out(cb):
        if cb.training and cb.micro.i!=1: raise CancelBatchException
    def train(bs, cbs):
        dls = make_dls(N, bs, y=y, shuffle=False)
        dls.n_inp = 1
        learn = make_learner(dls, loss_func=loss, cbs=cbs, opt_func=partial(SGD, mom=.9, wd=.1))
        learn.fit(2, cbs=Callback(before_validate=skip))
        return learn
    a,b = train(BS, AccumulateStep(**window)),train(32, Callback(before_batch=leave_out))
    # the first window has no loss, and none before it: it is not logged
    assert_same(a, b, but=('losses','lrs','iters','values','final_record','smooth_loss'))
    assert len(a.recorder.lrs)==5 and not any(math.isnan(o) for o in a.recorder.losses)
    assert a.accumulate_step.counts.sizes==[0,32,0]*2
def skip(cb): raise CancelValidException

class PairMix(MixHandler):
    "MixUp that mixes neighbours, so that the batch size does not change the draws"
    def before_batch(self):
        i = torch.arange(len(self.y))^1
        self.lam = torch.full((len(self.y),), .7).double()
        self.yb1,x1 = tuple(o[i] for o in self.yb),self.x[i]
        self.learn.xb = (torch.lerp(x1, self.x, .7),)

@pytest.mark.parametrize('loss', [nn.CrossEntropyLoss(weight=W), nn.CrossEntropyLoss(), FocalLoss(weight=W),
                                  LabelSmoothingCrossEntropy()], ids=str)
def test_mixup(loss):
    "Under MixUp a weighted cross-entropy divides by the samples"
    loss.y_int = True
    try: assert_same(*pair(loss, rare(), cbs=[PairMix]))
    finally:
        if 'y_int' in loss.__dict__: del loss.y_int

def test_two_denominators():
    "Label smoothing with class weights divides by two numbers, so no single weight makes it exact"
    for loss,y in (LabelSmoothingCrossEntropy(weight=W), rare()), (LabelSmoothingCrossEntropy(), ignoring(.9)):
        a,b = pair(loss, y, fit=lambda l: l.fit(1))
        err = rel(snapshot(a)['step.grads'][:1], snapshot(b)['step.grads'][:1])[0]
        assert 1e-4<err<5e-2, err

def test_partials():
    "A `partial` keeps the flattening of fastai's losses, and its keywords count"
    p,t = real(4,1),real(4)
    assert loss_weight(partial(MSELossFlat()), p, t)==4
    def mine(pred, targ, reduction='mean'): return getattr(F.l1_loss(pred, targ, reduction='none'), reduction)()
    def total(pred, targ, reduction='sum'): return mine(pred, targ, reduction)
    for f,red,nature in (mine,'mean',False), (partial(mine, reduction='sum'),'sum',False), (total,'sum',True), \
                        (partial(total, reduction='mean'),'mean',False), \
                        (partial(nn.MSELoss(), reduction='none'),'none',False), \
                        (partial(F.mse_loss, reduction='sum'),'sum',False), (F.kl_div,'mean',False):
        assert (loss_reduction(f),sums_by_nature(f))==(red,nature), f

def test_extend():
    class Mine(nn.Module):
        def forward(self, pred, targ): return masked(pred, targ.abs(), (targ[:,0]>0).double())
    y = real(N,3)
    before = worst(*pair(Mine(), y, fit=lambda l: l.fit(1)))[0]
    loss_weight.register(Mine, lambda f, pred, targ: (targ[:,0]>0).sum())
    assert_same(*pair(Mine(), y))
    assert before>1e-3

def any_window(data):
    """Any batch size, window in micro-batches or samples, length, skipped items, share of ignored targets, weights,
    and either rule for the tail"""
    draw = data.draw
    bs,n,drop = draw(st.integers(1,9)),draw(st.integers(1,60)),draw(st.booleans())
    window = dict(n_step=draw(st.integers(1,6))) if draw(st.booleans()) else dict(n_samples=draw(st.integers(1,40)))
    size = window.get('n_step') or -(-window['n_samples']//bs)
    skip = set() if drop else draw(st.sets(st.integers(0,n-1), max_size=n-1))
    if drop and n<bs*size: return   # never a step: an error, tested elsewhere
    w = torch.tensor(draw(st.lists(st.floats(.01,100), min_size=3, max_size=3))).double()
    y = torch.where(torch.rand(n, generator=torch.Generator().manual_seed(n))<draw(st.floats(0,.9)), classes(n), -100)
    res,nans = [],[]   # of windows without targets, where the large batch steps on NaN
    def note(cb): nans.append(cb.training and cb.loss.isnan().item())
    for b,cb in ((bs, AccumulateStep(**window)), (bs*size, Callback(after_loss=note))):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            dls = make_dls(n, b, y=y, drop_last=drop, skip=skip)
            learn = make_learner(dls, loss_func=nn.CrossEntropyLoss(weight=w), cbs=cb, opt_func=partial(SGD, mom=.9))
            learn.fit_one_cycle(2); learn.fit(1)
        res.append(learn)
    if res[1].spy.steps and not any(nans): assert_same(*res)
    n = res[0].accumulate_step.counts
    assert n.n_samples==n.n_stepped+n.n_thrown

@settings(max_examples=60, deadline=None, derandomize=True)   # the same draws each time; the sweep below draws anew
@given(st.data())
def test_property(data): any_window(data)

@settings(max_examples=600, deadline=None)
@given(st.data())
def test_property_sweep(data): any_window(data)
