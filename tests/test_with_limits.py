"What acts once a micro-batch by its nature, by how much that differs, and what to do instead"
from matrix import *
from fastai_accum.microbatch import *
from nets import clamped
from test_with_losses import not_same

def clip(cb):
    if cb.training: nn.utils.clip_grad_value_(cb.model.parameters(), .01)
def decay(cb):
    if cb.training:
        for p in cb.model.parameters(): p.grad.add_(p.detach(), alpha=.3)
def zero(cb): cb.learn.opt.zero_grad()

def rmse(pred, y): return F.mse_loss(pred[:,0], y.double()).sqrt()

class SAM(Callback):
    "Sharpness-aware minimisation (Foret et al., 2021): steps with the gradient at the worst point nearby"
    run_valid = False
    def __init__(self, rho=.3): self.rho = rho
    def before_step(self):
        learn,ps = self.learn,list(self.model.parameters())
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        es = [p.grad*(self.rho/norm) for p in ps]
        with torch.no_grad():
            for p,e in zip(ps, es): p.add_(e); p.grad = None
        learn.loss_func(learn.model(*learn.xb), *learn.yb).backward()
        with torch.no_grad():
            for p,e in zip(ps, es): p.sub_(e)

def taught():
    "A teacher that follows in `forward`"
    def f(m, x):
        if m.training:
            for p,q in zip(m.t.parameters(), m.m.parameters()): p.data.lerp_(q.data, .1)
        return m.m(x)+.1*m.t(x)
    return Made(f, m=small_model(), t=small_model().requires_grad_(False))

def average_in_loss():
    "Divides by a running average of itself"
    def f(m, pred, y):
        loss = F.cross_entropy(pred, y)
        if loss.requires_grad: m.avg = .9*m.avg+.1*loss.item()
        return loss/m.avg
    return Made(f, avg=1.)

def counting():
    n = itertools.count()
    return ParamScheduler(dict(lr=lambda pct: .02/(1+next(n))))

w = tensor([1.,10.3,3.7])
def weighted(): return lambda p, y: F.cross_entropy(p, y, weight=w.double())

def with_first(*layers): return lambda: nn.Sequential(*[f() for f in layers], nn.Tanh(), nn.Linear(5, 3)).double()
linear = partial(nn.Linear, 6, 5)

def run(bs, *cbs, model=small_model, loss=nn.CrossEntropyLoss, opt_func=partial(SGD, mom=.9), lr=.1, fit=None):
    torch.manual_seed(0)
    learn = make_learner(make_dls(76, bs), model(), loss(), opt_func, cbs, **one_group)
    (fit or partial(Learner.fit, n_epoch=2, lr=lr))(learn)
    return learn

def limit(name, note, least=1e-3, cb=list, weight=None, **kwargs):
    "A row for what `cb`, `weight` or `kwargs` bring into a training: weights differ by `least` or more"
    return pytest.param(cb, weight, least, kwargs, marks=not_same(name, 'weights', note=note))

savers = '`GradientCheckpointing()`, `OffloadActivations()`'
same_with = f'{savers} and `MicroBatch(bs, exact=True)` are exact.'
in_step = 'It acts on each micro-batch. Act in `before_step`, which is exact.'
@pytest.mark.parametrize('cb,weight,least,kwargs', [
    limit('`clip_grad_value_` in `after_backward`', in_step, cb=lambda: Callback(after_backward=clip)),
    limit('weight decay by hand in `after_backward`', in_step, cb=lambda: Callback(after_backward=decay)),
    limit('a hook on a parameter that clamps its gradient',
          'It clamps the gradient of each micro-batch. Clamp in `before_step`.', model=clamped),
    limit('`zero_grad` in `before_batch`', 'It deletes the gradients of earlier micro-batches. You do not need it: '
          'fastai calls `zero_grad` after each step.', cb=lambda: Callback(before_batch=zero)),
    limit('SAM, and others that run the model again in `before_step`', 'They only see the last micro-batch. With '
          '`MicroBatch(bs, coupled=True)` they see the whole batch, which is exact.', cb=SAM),
    limit('spectral norm', 'Its state changes in `forward`, which runs once per micro-batch.', 1e-4, opt_func=Adam,
          lr=.02, model=with_first(lambda: nn.utils.parametrizations.spectral_norm(linear()))),
    limit('a teacher that is updated in `forward`',
          'It is updated once per micro-batch. Update it in `after_step`.', 1e-4, model=taught, opt_func=Adam, lr=.02),
    limit('a running average inside the loss', 'It moves once per micro-batch. Update it in `after_step`.', 1e-4,
          loss=average_in_loss, opt_func=SGD, lr=.2),
    limit('a schedule function that counts its calls', 'It is called once per micro-batch. Write a function of `pct` '
          'instead, which is exact.', 1e-4, cb=counting, opt_func=Adam),
    limit('batch norm', f'It uses the statistics of the micro-batch. {same_with}', fit=once, opt_func=Adam,
          model=with_first(linear, partial(nn.BatchNorm1d, 5))),
    limit('dropout', f'It draws other masks, with the same distribution. {same_with}', fit=once, opt_func=Adam,
          model=with_first(partial(nn.Dropout, .1), linear, partial(nn.Dropout, .3))),
    limit('a loss that compares samples, here RMSE', 'The mean of the RMSEs of the micro-batches is not the RMSE of '
          f'the batch. {savers} and `MicroBatch(bs, coupled=True)` are exact.', loss=lambda: rmse, fit=once,
          opt_func=Adam),
    limit('`weight=` that returns float32', 'The weight is rounded to float32. Return a Python number or float64.',
          1e-10, weight=lambda p, y: w[y].sum()*(1/3), loss=weighted, opt_func=Adam, lr=.02)])
def test_differs(cb, weight, least, kwargs, works):
    a,b = run(8, AccumulateStep(4, weight=weight), *L(cb()), **kwargs),run(32, *L(cb()), **kwargs)
    works.differs(weights(a), weights(b), least)

def test_coupled_beside_sam():
    a,b = run(32, SAM(), MicroBatch(8, coupled=True)),run(32, SAM())
    assert_same(a, b)
    assert worst(b, run(32))[0]>1e-3

def trained(cb):
    learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(4), cb])
    learn.fit(1)
    return cb

@not_same('predictions that a callback gathers in `after_batch`', 'share of the samples that are missing',
          note='It only sees the last micro-batch of a window. Gather in `after_loss`, or set `each_micro_batch = '
               'True` in the class.')
def test_gathers(works):
    def n_gathered(event):
        seen = []
        def gather(cb):
            if cb.training: seen.extend(cb.learn.pred)
        trained(Callback(**{event:gather}))
        return len(seen)
    works.error(1-n_gathered('after_batch')/96)
    assert n_gathered('after_batch')==24 and n_gathered('after_loss')==96

class Counts(Callback):
    "Takes in `before_batch` what it gives back in `after_batch`"
    run_valid,n = False,0
    def before_batch(self): self.n += 1
    def after_batch(self): self.n -= 1

@not_same('a callback that takes something in `before_batch` and gives it back in `after_batch`',
          'share of the times that it is not given back',
          note='`before_batch` comes once per micro-batch, but `after_batch` only once per window. Set '
               '`each_micro_batch = True` in the class.')
def test_pairs(works):
    n = trained(Counts()).n
    works.error(n/12)
    assert n==9 and trained(type('Each', (Counts,), dict(each_micro_batch=True))()).n==0
