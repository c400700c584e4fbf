"Losses, in windows of very unequal weights (`test_losses` has the grids), and what is not the same"
from matrix import *
from test_losses import BS,N,W,flat,ignoring,losses,pair as loss_pair,rare


fastais = dict(   # cases of `flat`, and a note
    CrossEntropyLossFlat           = ('ce ce_void ce_axis',
                                      'With class weights, ignored targets, and `axis=1` for pixels.'),
    BCEWithLogitsLossFlat          = ('bce bce_pos', 'With and without `pos_weight`.'),
    BCELossFlat                    = ('bce_prob', ''),
    MSELossFlat                    = ('mse mse_1', ''),
    L1LossFlat                     = ('l1', ''),
    FocalLossFlat                  = ('focal', 'With class weights.'),
    LabelSmoothingCrossEntropyFlat = ('smooth', ''),
    DiceLoss                       = ('dice', 'It is a sum over the batch, and stays one.'),
)
assert {k for ks,_ in fastais.values() for k in ks.split()}==set(flat), 'a loss has no row'
def marks(name, note): return row('Losses', name, tol=TOL32, note=' '.join(['Computed in float32.', *L(note or None)]))
@pytest.mark.parametrize('name', [pytest.param(k, marks=marks(k, note)) for k,(_,note) in fastais.items()])
def test_flat(name, works):
    "In float32, with momentum instead of Adam, since Adam would divide one rounding error by another"
    for k in fastais[name][0].split():
        loss,y,model = (*flat[k], small_model)[:3]
        def train(bs, cbs):
            dls = make_dls(N, bs, y=y, x=features(N).float(), shuffle=False)
            learn = make_learner(dls, model().float(), loss, splitter=trainable_params, cbs=cbs,
                                 opt_func=partial(SGD, mom=.9))
            learn.fit_one_cycle(2)
            return learn
        works(train(BS, AccumulateStep(4)), train(4*BS, []))

plain = [k for k,(f,*_) in losses.items() if type(f).__module__.startswith('torch.nn')]
@row('Losses', 'losses of `torch.nn`', note='All losses that take a mean. [The page on weights](loss.html) lists them.')
@each(name=plain)
def test_losses_of_torch(name, works): works(*loss_pair(*losses[name]))

@row('Losses', 'FocalLoss, LabelSmoothingCrossEntropy', note='The plain modules of fastai.')
@each(name=['focal','smoothing'])
def test_modules(name, works): works(*loss_pair(*losses[name]))

@row('Losses', 'functions of `torch.nn.functional`',
     note='Also a `partial` of one, with its class weights and ignored targets.')
@each(name=['ce_function','ce_function_w','mse_function'])
def test_functions(name, works): works(*loss_pair(*losses[name]))

def masked(pred, targ, mask): return (((pred-targ)**2).mean(1)*mask).sum()/mask.sum()

@row('Losses', 'a loss of your own',
     note='A mean over samples works without an argument. Any other needs `weight=`, here a masked mean.')
@each(own_weight=[False, True])
def test_own(own_weight, works):
    if not own_weight: return works(*loss_pair(*losses['unknown']))
    y,mask = losses['mse'][1],(torch.arange(N)%3>0).double()
    mask[8:16] = 0
    works(*loss_pair(masked, (y,mask), window=dict(n_step=4, weight=lambda pred,targ,mask: mask.sum())))

not_same = partial(row, 'Not the same', tol=math.inf)

@not_same('batch norm', 'weights',
          note='It uses the statistics of the micro-batch. `MicroBatch(bs, exact=True)` is exact.')
def test_batch_norm_differs(works):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6,5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5,3)).double()
    a,b = pair(model=model)
    works.differs(weights(a), weights(b), 1e-3)

@not_same('dropout', 'weights',
          note='It draws other masks, with the same distribution. `MicroBatch(bs, exact=True)` is exact.')
def test_dropout_differs(works):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Dropout(.1), nn.Linear(6,5), nn.Dropout(.3), nn.Tanh(), nn.Linear(5,3)).double()
    a,b = pair(model=model)
    works.differs(weights(a), weights(b), 1e-3)

def rmse(pred, y): return F.mse_loss(pred[:,0], y.double()).sqrt()

@not_same('a loss that compares samples, here RMSE', 'weights',
          note='The mean of the RMSEs of the micro-batches is not the RMSE of the batch. `MicroBatch(bs, '
               'coupled=True)` is exact.')
def test_rmse(works):
    a,b = pair(loss_func=rmse)
    works.differs(weights(a), weights(b), 1e-3)

@not_same('LabelSmoothingCrossEntropy with class weights, or ignored targets', 'gradients of the first step',
          note='Its two parts divide by different numbers. Take '
               '`nn.CrossEntropyLoss(label_smoothing=…, weight=…)`, which divides by one.')
@pytest.mark.parametrize('loss,y', [(LabelSmoothingCrossEntropy(weight=W), rare()),
                                    (LabelSmoothingCrossEntropy(), ignoring(.9))], ids=['weights','ignored'])
def test_two_denominators(loss, y, works):
    a,b = loss_pair(loss, y, fit=lambda l: l.fit(1))
    works.differs(a.spy.steps[0]['grads'], b.spy.steps[0]['grads'], 1e-4)

@not_same('a plain mean over micro-batches of different weights', 'weights',
          note="fastai's `GradientAccumulation` with class weights, for comparison.")
def test_mean_of_means(works):
    def train(bs, cb):
        learn = make_learner(make_dls(N, bs, y=rare(), shuffle=False), loss_func=nn.CrossEntropyLoss(weight=W), cbs=cb)
        learn.fit(2)
        return learn
    works.differs(weights(train(8, GradientAccumulation(32))), weights(train(32, [])), 1e-2)
