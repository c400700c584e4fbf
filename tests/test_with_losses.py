"Losses, in windows of very unequal weights (`test_losses` has the grids), and what is not the same"
from matrix import *
from nets import masked
from test_losses import N,W,flat,ignoring,losses,pair as loss_pair,rare

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
def in_order(y, x=None): return partial(make_dls, y=y, x=x, shuffle=False)
def marks(name, note): return row('Losses', name, tol=TOL32, note=' '.join(['Computed in float32.', *L(note or None)]))
@pytest.mark.parametrize('name', [pytest.param(k, marks=marks(k, note)) for k,(_,note) in fastais.items()])
def test_flat(name, works):
    "In float32, with momentum instead of Adam, since Adam would divide one rounding error by another"
    for k in fastais[name][0].split():
        loss,y,model = (*flat[k], small_model)[:3]
        works(*pair(dls=in_order(y, features(N).float()), model=lambda: model().float(), loss_func=loss,
                    opt_func=partial(SGD, mom=.9), fit=lambda l: l.fit_one_cycle(2), **one_group))

def trained(name, note, *names):
    "A row of `losses` of these names"
    @row('Losses', name, note=note)
    def test(works): each(k=names)(lambda k: works(*loss_pair(*losses[k])))()
    return test

test_losses_of_torch = trained(
    'losses of `torch.nn`', 'All losses that take a mean. [The page on weights](loss.html) lists them.',
    *[k for k,(f,*_) in losses.items() if type(f).__module__.startswith('torch.nn')])
test_modules = trained('FocalLoss, LabelSmoothingCrossEntropy', 'The plain modules of fastai.', 'focal', 'smoothing')
test_functions = trained(
    'functions of `torch.nn.functional`', 'Also a `partial` of one, with its class weights and ignored targets.',
    'ce_function', 'ce_function_w', 'mse_function')

@row('Losses', 'a loss of your own',
     note='A mean over samples works without an argument. Any other needs `weight=`, here a masked mean.')
@each(own_weight=[False, True])
def test_own(own_weight, works):
    if not own_weight: return works(*loss_pair(*losses['unknown']))
    y,mask = losses['mse'][1],(torch.arange(N)%3>0).double()
    mask[8:16] = 0
    works(*loss_pair(masked, (y,mask), window=dict(n_step=4, weight=lambda pred,targ,mask: mask.sum())))

not_same = partial(row, 'Not the same', tol=math.inf)

@not_same('LabelSmoothingCrossEntropy with class weights, or ignored targets', 'gradients of the first step',
          note='Its two parts divide by different numbers. Take '
               '`nn.CrossEntropyLoss(label_smoothing=…, weight=…)`, which divides by one.')
@each(case=[(LabelSmoothingCrossEntropy(weight=W), rare()), (LabelSmoothingCrossEntropy(), ignoring(.9))])
def test_two_denominators(case, works):
    a,b = loss_pair(*case, fit=lambda l: l.fit(1))
    works.differs(a.spy.steps[0]['grads'], b.spy.steps[0]['grads'], 1e-4)

@not_same('a plain mean over micro-batches of different weights', 'weights',
          note="fastai's `GradientAccumulation` with class weights, for comparison.")
def test_mean_of_means(works):
    a,b = pair(own=partial(GradientAccumulation, 32), dls=in_order(rare()), loss_func=nn.CrossEntropyLoss(weight=W),
               fit=lambda l: l.fit(2))
    works.differs(weights(a), weights(b), 1e-2)
