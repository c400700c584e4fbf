"""Models, losses, loaders and schedules that several files of tests share; `harness` trains and compares what they are
part of, and `kinds` has the odd models"""
from harness import *

# ---- models, and how a learner gets ready batches

def layers(*ms, d=6, bias=True):
    "Two layers around `ms`. Before a batch norm, leave out the bias: its gradient is nothing but rounding"
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(d,5,bias=bias), *ms, nn.Tanh(), nn.Linear(5,3)).double()

def normed(*ms, **kwargs): return layers(nn.BatchNorm1d(5), *ms, bias=False, **kwargs)

def of_batches(train, valid=None, n_inp=1, **kwargs):
    "Loaders of these batches"
    dls = DataLoaders(*[DataLoader(o, bs=None, **kwargs) for o in (train, train if valid is None else valid)], **kwargs)
    for o in (dls,*dls.loaders) if n_inp else (): o.n_inp = n_inp
    return dls

def whole(cbs, n=76, bs=32, **kwargs): return same(cbs, bs, bs, n, **{**one_group, **kwargs})   # the same batches

def quiet(learn): learn.remove_cb(ProgressCallback).logger = noop; return learn

class Stream(torch.utils.data.IterableDataset):
    "Samples one after the other; if not `again`, each loop goes on where the one before was"
    def __init__(self, again=True): self.data = None if again else self.new()
    def new(self): yield from zip(features(400), classes(400))
    def __iter__(self): return self.data or self.new()

# ---- losses

def masked(pred, targ, mask): return (((pred-targ)**2).mean(1)*mask).sum()/mask.sum()
def pairs(p, y): return (p[::2]-p[1::2]).pow(2).mean()
def triplets(p, y):
    a,b,c = p.view(-1, 3, p.shape[1]).unbind(1)
    return F.relu((a-b).pow(2).sum(1)-(a-c).pow(2).sum(1)+1).mean()

def scaled(loss=F.cross_entropy):
    "A loss with a parameter that the optimizer does not hold"
    return Made(lambda m, p, y: loss(p*m.s, y), s=nn.Parameter(torch.ones(3).double()))

# ---- what models and callbacks do

def grows(pct): return 1 if pct<.3 else 3 if pct<.7 else 6

def out_of_memory(*_): raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')

def limited(m, most, backward=False):
    "`m`, which runs out of memory with more than `most` samples, in the forward or in the backward pass"
    def f(o, x):
        if len(x)>o.most and not backward: out_of_memory()
        y = o.m(x)
        if len(x)>o.most and o.training and y.requires_grad: y.register_hook(out_of_memory)
        return y
    return Made(f, m=m, most=most)

class Elsewhere(Callback):
    """Parameters with an optimizer of their own, which neither the model nor the learner's optimizer has: `used` in the
    loss function, in a penalty after it, or only in some micro-batches; or a global variable holds them. `before` is a
    gradient from before the fit"""
    order = -5
    def __init__(self, used, before=None): self.used,self.before,self.grads = used,before,[]
    def before_fit(self):
        self.was,self.unused = self.learn.loss_func,nn.Parameter(features(3, 3, 8))
        here.c = self.was.__self__.c if self.used=='method' else nn.Parameter(features(3, 3, 7))
        if self.used=='global':
            self.learn.loss_func = lambda p, y: self.was(p, y)+(p-here.c[y]).pow(2).mean()
            return
        self.c = self.was.s if self.used=='module' else here.c
        if self.used=='tensor': self.c = features(3, 3, 7).requires_grad_()
        self.c.grad = self.before and torch.full((3,3), self.before).double()
        self.o = torch.optim.SGD([self.c], lr=.4, momentum=.5)
        if self.used in ('loss','tensor'): self.learn.loss_func = lambda p, y: self.was(p, y)+self.penalty(p, y)
        if self.used=='hook': self.h = self.model[0].register_forward_hook(lambda m, x, y: y*self.c.mean())
    def penalty(self, p, y): return .3*(p-self.c[y]).pow(2).mean()
    def after_loss(self):
        far = (self.x[:,:1]>1).double() if self.used=='some' else 1
        if self.used in ('penalty','some') and torch.any(torch.as_tensor(far)>0):
            self.learn.loss_grad = self.loss_grad+.3*(far*(self.pred-self.c[self.y])).pow(2).mean()
    def after_step(self):
        if self.c.grad is not None: self.grads.append(self.c.grad.clone())
        self.o.step(); self.o.zero_grad()
    def after_fit(self):
        self.learn.loss_func,self.model.c = self.was,self.c   # compared with the parameters
        assert self.unused.grad is None, 'it takes no part'
        if self.used=='hook': self.h.remove()

def clamped():
    "A hook on each parameter clamps its gradient"
    m = small_model()
    for p in m.parameters(): p.register_hook(lambda g: g.clamp(-.01, .01))
    return m

def steps_in_backward(model):
    "Hooks of the parameters step in the backward pass, and free the gradient"
    def step(p):
        p.data -= .1*p.grad
        p.grad = None
    return [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
