"A window of one micro-batch is plain fastai to every callback: batches differ in size here, and classes are weighted"
from harness import *
from fastai_accum.all import *

class Clip(Callback):
    def after_backward(self): nn.utils.clip_grad_norm_(self.model.parameters(), .1)
class LogNorm(Callback):
    def before_fit(self): self.norms = []
    def after_backward(self): self.norms.append(sum(p.grad.norm().item() for p in self.model.parameters()))
class Penalty(Callback):
    "A backward pass of its own"
    def before_backward(self): (.1*sum(p.pow(2).sum() for p in self.model.parameters())).backward()
class Decays(Callback):
    def after_backward(self):
        for p in self.model.parameters(): p.grad.add_(p.detach(), alpha=.1)
class ReadsLossGrad(Callback):
    def before_fit(self): self.norms = []
    def after_backward(self): self.norms.append(self.learn.loss_grad.item())

ways = dict(one_step=lambda: AccumulateStep(1), by_samples=lambda: AccumulateStep(n_samples=12),
            uncut=lambda: MicroBatch(100), coupled=lambda: MicroBatch(5, coupled=True),
            exact=lambda: MicroBatch(5, exact=True))
losses = dict(mean=None, weighted=nn.CrossEntropyLoss(weight=tensor([1.,5.,.2]).double()))

@drawn(10, way=ways, cb=[Clip,LogNorm,Penalty,Decays,ReadsLossGrad], loss=losses)
def test_it_is_plain(way, cb, loss):
    learn,plain = same(ways[way], bs=12, large=12, n=32, also=cb, loss_func=losses[loss])
    for o in learn.cbs:
        if isinstance(o, cb) and hasattr(o, 'norms'): close(o.norms, first(plain.cbs, risinstance(cb)).norms)
