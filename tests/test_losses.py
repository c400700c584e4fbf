"Losses of the registry: the weight is what its mean divides by, and training with it is the large batch's"
import pytest
from functools import partial
from harness import *
from fastai_accum.loss import *

N,BS = 76,8      # windows of 4: two full ones, and a tail of two whose last is half as large

def real(*shape, seed=3): return features(math.prod(shape), 1, seed).reshape(shape)
def signs(*shape): return (real(*shape)>0).double()*2-1
def ignoring(p, value=-100):
    "Classes of which a share `p` is ignored in the first half of each window and none in the second"
    y = classes(N)
    out = (torch.rand(N, generator=torch.Generator().manual_seed(5))<p) & (torch.arange(N)//16%2==0)
    return torch.where(out, value, y)
def void(): y = classes(N); y[8:16] = -100; return y
def rare(): y = torch.zeros(N).long(); y[::11] = 1; y[40:48] = 2; return y
W  = torch.tensor([1., 10., 3.]).double()
W0 = torch.tensor([1., 10., 0.]).double()

class Pixels(nn.Module):
    "Six features to a map of 3 classes on 4 × 4 pixels"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.lin = nn.Linear(6,48).double()
    def forward(self, x): return self.lin(x).reshape(-1,3,4,4)
class Steps(nn.Module):
    "Six features to log-probabilities of 3 classes at 7 steps, samples in the second dimension"
    def __init__(self): super().__init__(); torch.manual_seed(0); self.lin = nn.Linear(6,21).double()
    def forward(self, x): return self.lin(x).reshape(-1,7,3).log_softmax(-1).transpose(0,1)
def wrap(f): return lambda: nn.Sequential(*small_model(), f)
def pixels(p=0.):
    "Classes of 4 × 4 pixels; a share `p` of every other four samples is void, class 255"
    out = torch.rand(N,4,4, generator=torch.Generator().manual_seed(6)) < p*(torch.arange(N)%8<4).reshape(N,1,1)
    return torch.where(out, 255, classes(N*16).reshape(N,4,4))

losses = dict(
    ce                = (nn.CrossEntropyLoss(), classes(N)),
    ce_ignored        = (nn.CrossEntropyLoss(), ignoring(.9)),
    ce_void           = (nn.CrossEntropyLoss(), void()),
    ce_weighted       = (nn.CrossEntropyLoss(weight=W), rare()),
    ce_weight_zero    = (nn.CrossEntropyLoss(weight=W0), rare()),
    ce_weighted_void  = (nn.CrossEntropyLoss(weight=W), void()),
    ce_smooth         = (nn.CrossEntropyLoss(label_smoothing=.1), ignoring(.9)),
    ce_smooth_void    = (nn.CrossEntropyLoss(label_smoothing=.1), void()),
    ce_smooth_weight  = (nn.CrossEntropyLoss(label_smoothing=.1, weight=W), rare()),
    ce_probabilities  = (nn.CrossEntropyLoss(weight=W), real(N,3).softmax(1)),
    ce_pixels         = (nn.CrossEntropyLoss(ignore_index=255), pixels(.95), Pixels),
    ce_function       = (partial(F.cross_entropy, ignore_index=2), classes(N)),
    ce_function_w     = (partial(F.cross_entropy, weight=W), rare()),
    nll               = (nn.NLLLoss(weight=W), rare(), wrap(nn.LogSoftmax(1))),
    mse               = (nn.MSELoss(), real(N,3)),
    mse_function      = (F.mse_loss, real(N,3)),
    l1                = (nn.L1Loss(), real(N,3)),
    smooth_l1         = (nn.SmoothL1Loss(), real(N,3)),
    huber             = (nn.HuberLoss(), real(N,3)),
    bce               = (nn.BCELoss(), real(N,3).sigmoid(), wrap(nn.Sigmoid())),
    bce_logits        = (nn.BCEWithLogitsLoss(pos_weight=W), real(N,3).sigmoid()),
    soft_margin       = (nn.SoftMarginLoss(), signs(N,3)),
    hinge             = (nn.HingeEmbeddingLoss(), signs(N,3)),
    poisson           = (nn.PoissonNLLLoss(), real(N,3).exp()),
    gaussian          = (nn.GaussianNLLLoss(), (real(N,3), real(N,3,seed=4).exp())),
    kl                = (nn.KLDivLoss(reduction='mean'), real(N,3).softmax(1), wrap(nn.LogSoftmax(1))),
    kl_batchmean      = (nn.KLDivLoss(reduction='batchmean'), real(N,3).softmax(1), wrap(nn.LogSoftmax(1))),
    multi_margin      = (nn.MultiMarginLoss(weight=W), classes(N)),
    multilabel_margin = (nn.MultiLabelMarginLoss(), torch.stack([classes(N), *[torch.full((N,), -1)]*2], 1)),
    multilabel_soft   = (nn.MultiLabelSoftMarginLoss(), (real(N,3)>0).double()),
    cosine            = (nn.CosineEmbeddingLoss(margin=.1), (real(N,3), signs(N))),
    ranking           = (nn.MarginRankingLoss(margin=.1), (real(N,3), signs(N,3))),
    triplet           = (nn.TripletMarginLoss(), (real(N,3), real(N,3,seed=4))),
    triplet_distance  = (nn.TripletMarginWithDistanceLoss(), (real(N,3), real(N,3,seed=4))),
    ctc               = (nn.CTCLoss(), (classes(N*2,2).reshape(N,2)+1, torch.full((N,),7), 1+classes(N,2,seed=8)),
                         Steps),
    focal             = (FocalLoss(weight=W), rare()),
    smoothing         = (LabelSmoothingCrossEntropy(), classes(N)),
    dice              = (DiceLoss(), pixels(), Pixels),
    dice_mean         = (DiceLoss(reduction='mean'), pixels(), Pixels),
    unknown           = (lambda pred,targ: (pred-targ).pow(4).mean(1).mean(), real(N,3)),
)
if hasattr(nn, 'LinearCrossEntropyLoss'):   # newer than the oldest PyTorch that is tested
    losses['linear_ce'] = (nn.LinearCrossEntropyLoss(3, 3, weight=W, dtype=torch.float64).requires_grad_(False), rare())

def pair(loss, y, model=small_model, window=None, large=32, loss_big=None, n=N, cbs=(),
         fit=lambda l: l.fit_one_cycle(2), **kwargs):
    "The learner that accumulates and the one with the large batch, trained"
    res = []
    for bs,f,cb in ((BS, loss, [AccumulateStep(**(window or dict(n_step=4)))]), (large, loss_big or loss, [])):
        dls = make_dls(n, bs, y=y, shuffle=False)
        dls.n_inp = 1
        learn = make_learner(dls, model(), loss_func=f, splitter=trainable_params, cbs=cb + [c() for c in cbs],
                             **kwargs)
        fit(learn)
        res.append(learn)
    return res

def check(name):
    loss,y,*model = losses[name]
    tol = 1e-5 if name.startswith('dice') else TOL   # DiceLoss computes in float32
    assert_same(*pair(loss, y, *model), tol=tol)

some = '''ce ce_ignored ce_void ce_weighted ce_weight_zero ce_smooth_weight ce_pixels ce_function_w mse bce_logits
kl_batchmean ctc focal smoothing dice unknown'''.split()

@pytest.mark.parametrize('name', some)
def test_registry(name): check(name)

flat = dict(
    ce       = (CrossEntropyLossFlat(weight=W.float()), rare()),
    ce_void  = (CrossEntropyLossFlat(), void()),
    ce_axis  = (CrossEntropyLossFlat(axis=1, ignore_index=255), pixels(.95), Pixels),
    bce      = (BCEWithLogitsLossFlat(), (real(N,3)>0).float()),
    bce_pos  = (BCEWithLogitsLossFlat(pos_weight=W.float()), (real(N,3)>0).float()),
    bce_prob = (BCELossFlat(), (real(N,3)>0).float(), wrap(nn.Sigmoid())),
    mse      = (MSELossFlat(), real(N,3).float()),
    mse_1    = (MSELossFlat(), real(N).float(), partial(small_model, out=1)),
    l1       = (L1LossFlat(), real(N,3).float()),
    focal    = (FocalLossFlat(weight=W.float()), rare()),
    smooth   = (LabelSmoothingCrossEntropyFlat(), classes(N)),
    dice     = (DiceLoss(), pixels(), Pixels),
)

def check_flat(name):
    "fastai's wrapped losses, in float32"
    loss,y,model = (*flat[name], small_model)[:3]
    def train(bs, cb):
        dls = make_dls(N, bs, y=y, x=features(N).float(), shuffle=False)
        learn = make_learner(dls, model().float(), loss_func=loss, splitter=trainable_params, cbs=cb,
                             opt_func=partial(SGD, mom=.9))
        learn.fit_one_cycle(2)
        return learn
    assert_same(train(BS, AccumulateStep(n_step=4)), train(32, None), tol=1e-5)

def masked(pred, targ, mask): return (((pred-targ)**2).mean(1)*mask).sum()/mask.sum()

def test_weight_function():
    "A hand-written masked mean, whose mask is empty for a micro-batch: 0/0 there, nothing in the window"
    mask = (real(N)>0).double(); mask[8:16] = 0; mask[20:27] = 0
    a,b = pair(masked, (real(N,3),mask), window=dict(n_step=4, weight=lambda pred,targ,mask: mask.sum()))
    assert_same(a, b)
    assert not any(math.isnan(o) for o in a.recorder.losses)

def test_kept_sum():
    "`average=False` keeps the sum of a mean loss; a loss that was set to 'sum' is averaged, with a warning, or kept"
    y = ignoring(.9)
    mean,total = nn.CrossEntropyLoss(),nn.CrossEntropyLoss(reduction='sum')
    valid = ('values','final_record')   # the validation loss is that of the loss function as it is given
    assert_same(*pair(mean, y, window=dict(n_step=4, average=False), loss_big=total), but=valid)
    assert_same(*pair(total, y, window=dict(n_step=4, average=False)))
    with pytest.warns(UserWarning, match="reduction='sum'") as rec: a,b = pair(total, y, loss_big=mean)
    assert len([o for o in rec if 'AccumulateStep' in str(o.message)])==1
    assert_same(a, b, but=valid)
    assert_same(*pair(DiceLoss(), pixels(), Pixels, window=dict(n_step=4, average=True),
                      loss_big=DiceLoss(reduction='mean')), tol=1e-5, but=valid)

@pytest.mark.parametrize('name', ['ce','ce_axis','bce_pos','dice'])
def test_flat_float32(name): check_flat(name)

def test_loss_function_is_untouched():
    loss = CrossEntropyLossFlat()
    state = dict(loss.__dict__), dict(loss.func.__dict__)
    learn = make_learner(make_dls(76, 8, x=features(76).float()), small_model().float(), loss_func=loss,
                         cbs=AccumulateStep(4))
    seen = []
    learn.add_cb(Callback(after_pred=lambda cb: seen.append(cb.learn.loss_func is loss and loss.reduction=='mean')))
    learn.fit(1)
    assert seen and all(seen) and (loss.__dict__,loss.func.__dict__)==state

# ---- losses that divide by max(c, positives): `weight=` returns two numbers

def positives(): return (real(N,3)>1.6).double()   # about one in twenty, so most micro-batches of two have none
def per_positive(c): return lambda pred,targ: bce_sum(pred, targ)/targ.sum().clamp(min=c)
def bce_sum(pred, targ): return F.binary_cross_entropy_with_logits(pred, targ, reduction='sum')
def both(c): return lambda pred,targ: (targ.sum().clamp(min=c), targ.sum())

ways = dict(accumulate=(2, lambda w: AccumulateStep(16, weight=w)),
            by_samples=(2, lambda w: AccumulateStep(n_samples=32, weight=w)),
            slices=(32, lambda w: MicroBatch(2, weight=w)))

@pytest.mark.parametrize('c', [1e-3,1.,4.,50.])
@pytest.mark.parametrize('k', ways)
def test_a_floor_under_the_divisor(k, c):
    bs,way = ways[k]
    assert any(o.sum()==0 for o in positives().split(2))
    same(lambda: way(both(c)), bs=bs, y=positives(), loss_func=per_positive(c))

def test_a_window_without_positives():
    "The large batch steps on the sum, so the window does, too"
    none = torch.zeros(N,3).double()
    same(lambda: AccumulateStep(16, weight=both(1.)), bs=2, y=none, loss_func=per_positive(1.))

@pytest.mark.parametrize('k', ways)
def test_one_warning_where_a_loss_is_left_out(k):
    bs,way = ways[k]
    cb = way(lambda pred,targ: targ.sum())
    learn = make_learner(make_dls(N, bs, positives()), loss_func=per_positive(1.), cbs=cb)
    for _ in range(2):
        with pytest.warns(UserWarning, match='weight 0.*coupled=True') as said: learn.fit(2)
        assert sum('weight 0' in str(o.message) for o in said)==1

@pytest.mark.parametrize('y', [void(), torch.full((N,), -100)], ids=['some','all'])
def test_no_warning_where_targets_are_ignored(y, recwarn):
    make_learner(make_dls(N, 2, y), cbs=AccumulateStep(16)).fit(1)
    assert not [o for o in recwarn if 'weight 0' in str(o.message)]

@pytest.mark.parametrize('k', ways)
@pytest.mark.parametrize('w', [lambda p,t: (t.sum()+1,t.sum()), lambda p,t: (t.sum()+1e-6,t.sum()),
                               lambda p,t: (t.sum(),t.sum().clamp(min=1))], ids=['plus_one','epsilon','swapped'])
def test_two_numbers_of_another_divisor(w, k):
    "n+1 would be off by 0.9, as the window divides by the largest of the first numbers, or the sum of the second"
    bs,way = ways[k]
    learn = make_learner(make_dls(N, bs, positives(), shuffle=False), loss_func=per_positive(1.), cbs=way(w))
    with pytest.raises(ValueError, match=r'must be max\(c, n\) and n, with the same c.*coupled=True'): learn.fit(1)
    assert not learn.spy.steps
