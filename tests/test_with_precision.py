"""Mixed and low precision.

fastai's `MixedPrecision` names the 'cuda' device and switches itself off without one; `OnCpu` is the same callback
with the CPU's autocast and scaler. Half precision rounds each product inside a batch, so a large batch and four
micro-batches differ by that rounding: `HALF` allows one of the dtype, for weights after 9 steps of SGD; four where
the weights are rounded at each step too. What the scaler decides is compared exactly, without autocast in float64."""
from matrix import *
from fastai_accum.extras import *
from test_precision import Low,error

class Overflow(Callback):
    "An infinite gradient in one micro-batch of each of `windows`, before the scaler looks at them"
    run_valid = False
    def __init__(self, windows, n_step): self.at = {w*n_step+1%n_step for w in windows}
    def before_fit(self): self.n = 0
    def after_backward(self):
        if self.n in self.at: next(self.model.parameters()).grad[0,0] = math.inf
        self.n += 1

class Updates(Callback):
    "The scale after each update of the scaler"
    order = 20
    def before_fit(self): self.learn.got = []
    def after_step(self): self.learn.got.append((self.scaler.get_scale(), self.scaler._get_growth_tracker()))

def scaler(): return OnCpu(init_scale=2.**10, growth_interval=3)

@row('Precision', 'MixedPrecision: the loss scaler', 'everything, the scales and their updates',
     note='In float64, without autocast. The scale grows and shrinks with the steps. An overflow in one micro-batch '
          'skips its window once.')
@each(windows=[[], [0], [2,3], [8]])
def test_scaler(windows, works):
    k = iter((4,1))
    a,b = pair(lambda: [scaler(), Overflow(windows, next(k)), Updates()], n=96, fit=lambda l: l.fit_one_cycle(3, .02))
    works(a, b)
    works.same(*[[l.got, l.mixed_precision.kept] for l in (a,b)], 'scales')
    assert len(a.got)==9 and len(a.mixed_precision.kept)==a.accumulate_step.counts.n_steps==9-len(windows)
    assert a.accumulate_step.counts.n_thrown==32*len(windows)
    if not windows: assert a.got[-1][0]==2.**13, 'the scale has not grown'

class Float32(Callback):
    "Inputs in float32"
    order = -2
    def before_batch(self): self.learn.xb = tuple(o.float() if o.is_floating_point() else o for o in self.xb)

def sgd(works, cbs, dtype=torch.float32):
    def fit(learn):
        if hasattr(learn, 'non_native_mixed_precision'): learn.remove_cb(Spy)   # flat masters differ in number
        learn.fit(3, .1)
    a,b = pair(cbs, model=lambda: small_model().to(dtype), opt_func=SGD, fit=fit)
    works.same(weights(a), weights(b))
    return a,b

def half(name, dtype, note, times=1): return row('Precision', name, 'weights', times*HALF[dtype], note)
for_long = 'For long windows add `GradAccumDtype`.'
@pytest.mark.parametrize('dtype,autocast', [
    pytest.param(torch.float16, True, marks=half('MixedPrecision, fp16', torch.float16,
        'With autocast and scaler of the CPU. Half precision rounds a large batch and micro-batches differently.')),
    pytest.param(torch.bfloat16, True, marks=half('MixedPrecision, bf16', torch.bfloat16,
        'With autocast of the CPU. Like fp16, with fewer digits and without a scaler.')),
    pytest.param(torch.bfloat16, False, marks=half('a model in bfloat16', torch.bfloat16, for_long, 4)),
    pytest.param(torch.float16, False, marks=half('a model in float16', torch.float16, for_long, 4))])
def test_half_precision(dtype, autocast, works):
    a,b = sgd(works, lambda: [Float32(), OnCpu(dtype)]) if autocast else sgd(works, Low, dtype)
    if autocast and dtype is torch.float16:
        assert a.mixed_precision.kept==b.mixed_precision.kept and len(a.mixed_precision.kept)==9

class NonNative(NonNativeMixedPrecision):
    "`NonNativeMixedPrecision` on the CPU, where all but the check that the loaders are on a GPU works"
    name = 'non_native_mixed_precision'
    def before_fit(self):
        dls,self.learn.dls = self.learn.dls,SimpleNamespace(device=SimpleNamespace(type='cuda'))
        try: super().before_fit()
        finally: self.learn.dls = dls

@half('NonNativeMixedPrecision', torch.float16,
      'On a CPU that stands in for a GPU. With and without flat master weights, with and without `clip`.')
@each(kw=[{}, *(dict(flat_master=flat, clip=clip, loss_scale=512, dynamic=False)
                for flat in (False,True) for clip in (None,.1))])
def test_non_native(kw, works):
    """A scale that moves starts too high: each window whose gradients overflow is lost, as a large batch is, and halves
    it"""
    a,b = (l.non_native_mixed_precision for l in sgd(works, lambda: [Float32(), ModelToHalf(), NonNative(**kw)]))
    n,lost = a.learn.accumulate_step.counts,0 if kw else 24-int(math.log2(a.loss_scale))
    assert n.n_steps==9-lost and n.n_thrown>=12*lost
    assert kw or lost>2 and a.loss_scale==b.loss_scale

@row('Precision', 'GradAccumDtype with the loss scaler', 'everything', note='Our own, with `GradientClip`.')
def test_grad_accum_dtype_and_scaler(works):
    works(*pair(lambda: [scaler(), GradientClip(.1)], own=lambda: [AccumulateStep(4), GradAccumDtype()],
                fit=lambda l: l.fit_one_cycle(3, .02)))

@row('Precision', 'GradAccumDtype',
     "gradients of a window with the float64 mean of the same low-precision gradients, in units of the last place", 2,
     'Our own, for models in float16 or bfloat16. Windows of 64 micro-batches.')
@each(dtype=[torch.float16,torch.bfloat16])
def test_grad_accum_dtype(dtype, works): works.error(error(dtype, 1, GradAccumDtype()).item())
