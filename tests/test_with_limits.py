"What acts once a micro-batch by its nature, by how much that differs, and what to do instead"
from matrix import *
from fastai_accum.microbatch import *
from test_with_losses import not_same

def clip(cb):
    if cb.training: nn.utils.clip_grad_value_(cb.model.parameters(), .01)
def decay(cb):
    if cb.training:
        for p in cb.model.parameters(): p.grad.add_(p.detach(), alpha=.3)
actions = dict(clip=(clip, "`clip_grad_value_` in `after_backward`"),
               decay=(decay, 'weight decay by hand in `after_backward`'))

def acts(name, event): return lambda: Callback(**{event:actions[name][0]})

@pytest.mark.parametrize('name',
                         [pytest.param(k,
                                       marks=not_same(nm, 'weights',
                                                      note='It acts on each micro-batch. Act in `before_step`, which '
                                                           'is exact.')) for k,(_,nm) in actions.items()])
def test_acts_in_after_backward(name, works):
    a,b = pair(acts(name, 'after_backward'), opt_func=partial(SGD, mom=.9), fit=lambda l: l.fit(2, .1))
    works.differs(weights(a), weights(b), 1e-3)
    assert_same(*pair(acts(name, 'before_step'), opt_func=partial(SGD, mom=.9), fit=lambda l: l.fit(2, .1)))

@not_same('a hook on a parameter that clamps its gradient', 'weights',
          note='It clamps the gradient of each micro-batch. Clamp in `before_step`.')
def test_parameter_hooks(works):
    def model():
        m = small_model()
        for p in m.parameters(): p.register_hook(lambda g: g.clamp(-.01, .01))
        return m
    a,b = pair(model=model, opt_func=partial(SGD, mom=.9), fit=lambda l: l.fit(2, .1))
    works.differs(weights(a), weights(b), 1e-3)

@not_same('`zero_grad` in `before_batch`', 'weights',
          note='It throws away the micro-batches before it. You do not need it: fastai calls `zero_grad` after each '
               'step.')
def test_zero_grad(works):
    def zero(cb): cb.learn.opt.zero_grad()
    a,b = pair(lambda: Callback(before_batch=zero), opt_func=partial(SGD, mom=.9), fit=lambda l: l.fit(2, .1))
    works.differs(weights(a), weights(b), 1e-3)

class SAM(Callback):
    "Sharpness-aware minimisation (Foret et al., 2021): steps with the gradient at the worst point nearby"
    run_valid = False
    def __init__(self, rho=.3): self.rho = rho
    def before_step(self):
        learn,ps = self.learn,[p for p in self.model.parameters()]
        norm = torch.stack([p.grad.norm() for p in ps]).norm()
        es = [p.grad*(self.rho/norm) for p in ps]
        with torch.no_grad():
            for p,e in zip(ps, es): p.add_(e); p.grad = None
        learn.loss_func(learn.model(*learn.xb), *learn.yb).backward()
        with torch.no_grad():
            for p,e in zip(ps, es): p.sub_(e)

@not_same('SAM, and others that run the model again in `before_step`', 'weights',
          note='They only see the last micro-batch. With `MicroBatch(bs, coupled=True)` they see the whole batch, '
               'which is exact.')
def test_sam(works):
    kwargs = dict(opt_func=partial(SGD, mom=.9), fit=lambda l: l.fit(2, .1))
    a,b = pair(SAM, matters=True, **kwargs)
    works.differs(weights(a), weights(b), 1e-3)
    c = make_learner(make_dls(76, 32), cbs=[SAM(),MicroBatch(8, coupled=True)], opt_func=kwargs['opt_func'])
    kwargs['fit'](c)
    assert_same(c, b)

class Teacher(nn.Module):
    "A teacher that follows in `forward`"
    def __init__(self): super().__init__(); self.m,self.t = small_model(),small_model().requires_grad_(False)
    def forward(self, x):
        if self.training:
            for p,q in zip(self.t.parameters(), self.m.parameters()): p.data.lerp_(q.data, .1)
        return self.m(x)+.1*self.t(x)
def spectral():
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6,5)), nn.Tanh(), nn.Linear(5,3)).double()
moving = dict(spectral=(spectral, 'spectral norm', 'Its state changes in `forward`, which runs once per micro-batch.'),
              teacher =(Teacher, 'a teacher that is updated in `forward`',
                        'It is updated once per micro-batch. Update it in `after_step`.'))

@pytest.mark.parametrize('name', [pytest.param(k, marks=not_same(nm, 'weights', note=note))
                                  for k,(_,nm,note) in moving.items()])
def test_state_that_moves(name, works):
    a,b = pair(model=moving[name][0], splitter=trainable_params, fit=lambda l: l.fit(2, .02))
    works.differs(weights(a), weights(b), 1e-4)

class AverageInLoss(nn.Module):
    "Divides by a running average of itself"
    def __init__(self): super().__init__(); self.avg = 1.
    def forward(self, pred, y):
        loss = F.cross_entropy(pred, y)
        if loss.requires_grad: self.avg = .9*self.avg+.1*loss.item()
        return loss/self.avg
@not_same('a running average inside the loss', 'weights',
          note='It moves once per micro-batch. Update it in `after_step`.')
def test_average_in_the_loss(works):
    res = []
    for bs,cbs in (8,AccumulateStep(4)),(32,None):
        res.append(make_learner(make_dls(76, bs), loss_func=AverageInLoss(), cbs=cbs, opt_func=SGD))
        res[-1].fit(2, .2)
    works.differs(*map(weights, res), 1e-4)

@not_same('a schedule function that counts its calls', 'weights',
          note='It is called once per micro-batch. Write a function of `pct` instead, which is exact.')
def test_counting_schedule(works):
    def sched():
        n = itertools.count()
        return lambda pct: .02/(1+next(n))
    a,b = pair(lambda: ParamScheduler(dict(lr=sched())), fit=lambda l: l.fit(2))
    works.differs(weights(a), weights(b), 1e-4)

@not_same('`weight=` that returns float32', 'weights',
          note='The weight is rounded to float32. Return a Python number or float64.')
def test_float32_weights(works):
    w = tensor([1.,10.3,3.7])
    def loss(p, y): return F.cross_entropy(p, y, weight=w.double())
    res = []
    for bs,cbs in (8,AccumulateStep(4, weight=lambda p, y: w[y].sum()*(1/3))),(32,None):
        res.append(make_learner(make_dls(76, bs), loss_func=loss, cbs=cbs))
        res[-1].fit(2, .02)
    works.differs(*map(weights, res), 1e-10)

class Gathers(Callback):
    "Gathers predictions where it is told to"
    def __init__(self, event): setattr(self, event, self._gather)
    def before_train(self): self.seen = []
    def _gather(self):
        if self.training: self.seen.append(self.learn.pred.detach())

@not_same('predictions that a callback gathers in `after_batch`', 'share of the samples that are missing',
          note='It only sees the last micro-batch of a window. Gather in `after_loss`, or set `each_micro_batch = '
               'True` in the class.')
def test_gathers(works):
    def n_seen(cb):
        learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(4), cb]); learn.fit(1)
        return len(torch.cat(learn.gathers.seen))
    works.error(1-n_seen(Gathers('after_batch'))/96)
    assert n_seen(Gathers('after_batch'))==24 and n_seen(Gathers('after_loss'))==96

class Counts(Callback):
    "Takes in `before_batch` what it gives back in `after_batch`"
    run_valid = False
    def before_fit(self): self.n = 0
    def before_batch(self): self.n += 1
    def after_batch(self): self.n -= 1
@not_same('a callback that takes something in `before_batch` and gives it back in `after_batch`',
          'share of the times that it is not given back',
          note='`before_batch` comes once per micro-batch, but `after_batch` only once per window. Set '
               '`each_micro_batch = True` in the class.')
def test_pairs(works):
    def left(cls):
        learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(4), cls()])
        learn.fit(1)
        return learn.cbs[-1].n
    works.error(left(Counts)/12)
    assert left(Counts)==9 and left(type('Each', (Counts,), dict(each_micro_batch=True)))==0
