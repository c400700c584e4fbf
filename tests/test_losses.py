"""The weight of each loss is what its mean divides by, and training with it is the large batch's: cut evenly and
unevenly, in windows without targets, and any window. Rows of the page of
what is exact train each loss as it is"""
import harness
from nets import *
from kinds import Odd
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

def head(n, f):
    torch.manual_seed(0)
    return Odd(lambda m, x: f(m.lin(x)), lin=nn.Linear(6,n)).double()
def Pixels(): return head(48, lambda h: h.reshape(-1,3,4,4))   # a map of 3 classes on 4 × 4 pixels
# log-probabilities of 3 classes at 7 steps, samples in the second dimension
def Steps(): return head(21, lambda h: h.reshape(-1,7,3).log_softmax(-1).transpose(0,1))
def wrap(f): return lambda: nn.Sequential(*small_model(), f)
def pixels(p=0.):
    "Classes of 4 × 4 pixels; a share `p` of every other four samples is void, class 255"
    out = torch.rand(N,4,4, generator=torch.Generator().manual_seed(6)) < p*(torch.arange(N)%8<4).reshape(N,1,1)
    return torch.where(out, 255, classes(N*16).reshape(N,4,4))

losses = dict(
    ce_ignored        = (nn.CrossEntropyLoss(), ignoring(.9)),
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

def train(loss, y, sizes, cbs=(), model=small_model, **kwargs):
    "The learner, trained on batches of these sizes"
    cuts = [0,*np.cumsum(sizes)]
    batches,valid = ([(features(N)[i:j], *(o[i:j] for o in tuplify(y))) for i,j in zip(ends, ends[1:])]
                     for ends in (cuts,[0,16,24]))
    return harness.train(cbs, dls=lambda _: of_batches(batches, valid), model=model, loss_func=loss,
                         **{**one_group, **kwargs})

small,large = [BS]*9+[4],[32,32,12]
def pair(loss, y, model=small_model, window=None, loss_big=None, **kwargs):
    "The learner that accumulates and the one with the large batch"
    a = train(loss, y, small, AccumulateStep(**(window or dict(n_step=4))), model, **kwargs)
    return a,train(loss_big or loss, y, large, (), model, **kwargs)

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
                      loss_big=DiceLoss(reduction='mean')), tol=TOL32, but=valid)

sizes = dict(equal=[8,8,8,8], unequal=[28,1,1,2], zero=[16,0,8,8], zero_first=[0,16,8,8])

@drawn(len(losses), name=losses, kind=sizes)
def test_sizes_of_micro_batches(name, kind):
    """Windows of 32 are cut evenly, very unevenly, and with a micro-batch of nothing, whose mean is NaN: each loss in
    one of these ways"""
    if name=='ctc' and 'zero' in kind: kind = 'unequal'   # torch's CTCLoss refuses an empty batch
    loss,y,*model = losses[name]
    a,b = (train(loss, y, o*2, cb, *model) for o,cb in ((sizes[kind],AccumulateStep(4)),([32],())))
    assert_same(a, b, TOL32 if name.startswith('dice') else TOL)   # DiceLoss computes in float32

empty = dict(
    ignored = (nn.CrossEntropyLoss(), torch.full((N,), -100)),
    smooth  = (nn.CrossEntropyLoss(label_smoothing=.1), torch.full((N,), -100)),
    weights = (nn.CrossEntropyLoss(weight=W0), torch.full((N,), 2)),
    masked  = (masked, (real(N,3),torch.zeros(N).double())),
    clamped = (lambda pred,targ,mask: (((pred-targ)**2).mean(1)*mask).sum()/mask.sum().clamp(min=1),
               (real(N,3),torch.zeros(N).double())))

@each(name=empty)
def test_window_of_weight_zero(name):
    "A whole window of weight 0 makes no step, and the one after it is that of the large batch from there"
    loss,y = empty[name]
    y = tuple(o.clone() for o in tuplify(y))
    y[-1][32:64] = 1
    weight = (lambda pred,targ,mask: mask.sum()) if len(y)>1 else None
    leave_out = raising(CancelBatchException, 'before_batch', lambda cb: cb.micro.i!=1)
    kwargs = dict(opt_func=partial(SGD, mom=.9, wd=.1), fit=lambda l: l.fit(2, cbs=NoValid()))
    a = train(loss, y, small, AccumulateStep(4, weight=weight), **kwargs)
    b = train(loss, y, large, leave_out, **kwargs)
    # the first window has no loss, and none before it: it is not logged
    assert_same(a, b, but=('losses','lrs','iters','values','final_record','smooth_loss'))
    assert len(a.recorder.lrs)==5 and not any(math.isnan(o) for o in a.recorder.losses)
    assert a.accumulate_step.counts.sizes==[0,32,0]*2

def test_partials():
    "A `partial` keeps the flattening of fastai's losses, and its keywords count"
    assert loss_weight(partial(MSELossFlat()), real(4,1), real(4))==4
    def mine(pred, targ, reduction='mean'): return getattr(F.l1_loss(pred, targ, reduction='none'), reduction)()
    def total(pred, targ, reduction='sum'): return mine(pred, targ, reduction)
    for f,red,nature in (mine,'mean',False), (partial(mine, reduction='sum'),'sum',False), (total,'sum',True), \
                        (partial(total, reduction='mean'),'mean',False), \
                        (partial(nn.MSELoss(), reduction='none'),'none',False), \
                        (partial(F.mse_loss, reduction='sum'),'sum',False), (F.kl_div,'mean',False):
        assert (loss_reduction(f),sums_by_nature(f))==(red,nature), f

# ---- losses that divide by max(c, positives): `weight=` returns two numbers

def positives(): return (real(N,3)>1.6).double()   # about one in twenty, so most micro-batches of two have none
def none(): return torch.zeros(N,3).double()       # the large batch steps on the sum, so the window does, too
assert any(o.sum()==0 for o in positives().split(2))
def per_positive(c): return lambda pred,targ: bce_sum(pred, targ)/targ.sum().clamp(min=c)
def bce_sum(pred, targ): return F.binary_cross_entropy_with_logits(pred, targ, reduction='sum')
def both(c): return lambda pred,targ: (targ.sum().clamp(min=c), targ.sum())

ways = dict(accumulate=(2, lambda w: AccumulateStep(16, weight=w)),
            by_samples=(2, lambda w: AccumulateStep(n_samples=32, weight=w)),
            slices=(32, lambda w: MicroBatch(2, weight=w)),
            in_windows=(32, lambda w: [MicroBatch(2), AccumulateStep(1, weight=w)]),
            beside=(32, lambda w: [MicroBatch(2, weight=w), AccumulateStep(1)]))

@each(6, c=[1e-3,1.,4.,50.], k=ways, y=[positives,none])
def test_a_floor_under_the_divisor(k, c, y):
    "And a weight that is one number, for a loss that nobody knows"
    bs,way = ways[k]
    same(lambda: way(both(c)), bs=bs, y=y(), loss_func=per_positive(c))
    same(lambda: way(lambda p, y: W[y].sum()), bs=bs, loss_func=lambda p, y: F.cross_entropy(p, y, weight=W))

@each(k=ways)
def test_one_warning_where_a_loss_is_left_out(k, recwarn):
    "Once a fit, and none where all targets are ignored"
    bs,way = ways[k]
    cb = way(lambda pred,targ: targ.sum())
    learn = make_learner(make_dls(N, bs, positives()), loss_func=per_positive(1.), cbs=cb)
    for _ in range(2):
        with pytest.warns(UserWarning, match='weight 0.*coupled=True') as said: learn.fit(2)
        assert sum('weight 0' in str(o.message) for o in said)==1
    make_learner(make_dls(N, 2, void()), cbs=AccumulateStep(16)).fit(1)
    assert not [o for o in recwarn if 'weight 0' in str(o.message)]

others = dict(plus_one=lambda p,t: (t.sum()+1,t.sum()), epsilon=lambda p,t: (t.sum()+1e-6,t.sum()),
              swapped=lambda p,t: (t.sum(),t.sum().clamp(min=1)))

@each(4, other=others, k=ways)
def test_two_numbers_of_another_divisor(other, k):
    "n+1 would be off by 0.9, as the window divides by the largest of the first numbers, or the sum of the second"
    bs,way = ways[k]
    learn = make_learner(make_dls(N, bs, positives(), shuffle=False), loss_func=per_positive(1.),
                         cbs=way(others[other]))
    with pytest.raises(ValueError, match=r'must be max\(c, n\) and n, with the same c.*coupled=True'): learn.fit(1)
    assert not learn.spy.steps
