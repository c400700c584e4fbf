"The check runs the learner's own step: its backward pass, its optimizer, its callbacks, its loss, and the batches of its loader"
import pytest
from harness import *
from harness import here
from fastai_accum.all import *
from torch.optim.lr_scheduler import ExponentialLR,OneCycleLR,StepLR

def make(*cbs, cls=Learner, bs=4, loss=None, n=64, x=None, y=None, model=None, opt=None, n_inp=None, **kwargs):
    x,y = features(n) if x is None else x, classes(n) if y is None else y
    items = list(zip(x, *tuplify(y)))
    dls = DataLoaders(*[DataLoader(items, bs=bs, **kwargs) for _ in range(2)], device=here.device)
    if n_inp:
        for dl in dls.loaders: dl.n_inp = n_inp
    learn = cls(dls, model or small_model(), loss_func=loss or nn.CrossEntropyLoss(), cbs=cbs, opt_func=opt or SGD, lr=.1)
    learn.recorder.smooth_loss = AvgSmoothLoss64()
    return learn.remove_cb(ProgressCallback)

def trained(learn, n=2):
    torch.manual_seed(5); random.seed(5); np.random.seed(5)
    with learn.no_logging(): learn.fit(n)
    return torch.cat([p.detach().flatten() for p in learn.model.parameters()])
def rel(a, b): return float((a-b).norm()/b.norm())
def kinds(check): return [o.kind for o in check.causes]

# a `_backward` of one's own
class Assigned(Learner):
    def _backward(self):
        ps = list(self.model.parameters())
        for p,g in zip(ps, torch.autograd.grad(self.loss_grad, ps)): p.grad = g.clone()
class Clipped(Learner):
    def _backward(self):
        super()._backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), .01)
class Cleared(Learner):
    def _backward(self):
        for p in self.model.parameters(): p.grad = None
        self.loss_grad.backward()
class Signs(Learner):
    def _backward(self):
        self.loss_grad.backward()
        for p in self.model.parameters(): p.grad.sign_()
class Normalised(Learner):
    def _backward(self):
        ps = list(self.model.parameters())
        gs = torch.autograd.grad(self.loss_grad, ps)
        size = torch.stack([g.norm() for g in gs]).norm()
        for p,g in zip(ps, gs): p.grad = g/size if p.grad is None else p.grad+g/size
class Penalty(Learner):
    "Adds a gradient that does not belong to `loss_grad`"
    def _backward(self):
        self.loss_grad.backward()
        for p in self.model.parameters(): p.grad.add_(.1*p.data)
class Twice(Learner):
    "Adds the same gradient twice, which is exact"
    def _backward(self):
        self.loss_grad.backward(retain_graph=True)
        self.loss_grad.backward()
class Added(Learner):
    def _backward(self):
        ps = list(self.model.parameters())
        for p,g in zip(ps, torch.autograd.grad(self.loss_grad, ps)): p.grad = g.clone() if p.grad is None else p.grad+g
class Inherited(Assigned): pass

@pytest.mark.parametrize('cls', [Assigned, Clipped, Cleared, Signs, Normalised, Penalty, Inherited])
def test_finds_a_backward_pass_of_ones_own(cls):
    "It says what the training does, and `coupled=True`, which it names, trains as the large batch does"
    large = trained(make(cls=cls, bs=16))
    assert rel(trained(make(AccumulateStep(4), cls=cls)), large)>1e-6
    check = make(AccumulateStep(4), cls=cls).check_accumulation()
    assert [(o.kind,o.where) for o in check.causes]==[('backward',cls.__name__)]
    assert 'coupled=True' in check.causes[0].remedy and 'add to the gradients' in check.causes[0].remedy
    assert rel(trained(make(MicroBatch(4, coupled=True), cls=cls, bs=16)), large)<TOL

@pytest.mark.parametrize('cls', [Twice, Added])
def test_a_backward_pass_that_adds_is_right(cls):
    assert not make(AccumulateStep(4), cls=cls).check_accumulation().causes
    assert rel(trained(make(AccumulateStep(4), cls=cls)), trained(make(cls=cls, bs=16)))<TOL

def test_beside_other_causes():
    model = nn.Sequential(nn.Linear(6,5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5,3)).double()
    assert kinds(make(AccumulateStep(4), cls=Assigned, model=model).check_accumulation())==['batch norm','dropout','backward']

# batches of a few samples
def hard(p, y): return F.cross_entropy(p, y, reduction='none').topk(max(1, len(y)//2)).values.mean()
def above(p, y):
    l = F.cross_entropy(p, y, reduction='none'); m = l>1.1
    return (l*m).sum()/m.sum().clamp(min=1)
def median(p, y): return F.cross_entropy(p, y, reduction='none').median()
def softened(p, y):
    l = F.cross_entropy(p, y, reduction='none')
    return (l*l.softmax(0)).sum()
def spread(p, y): return F.cross_entropy(p, y)+p.std()
def masked(p, y): return F.cross_entropy(p[y>0], y[y>0])

@pytest.mark.parametrize('seed', range(2))
@pytest.mark.parametrize('bs', [3,4])   # of two, the harder ones may be those of all, by luck
@pytest.mark.parametrize('loss', [hard, above, median, softened, spread, masked])
def test_small_batches(loss, bs, seed):
    "Samples come from as many batches as it takes"
    check = make(AccumulateStep(4), loss=loss, bs=bs, x=features(64, seed=seed+10), y=classes(64, seed=seed+20)).check_accumulation()
    assert kinds(check)==['loss'], check
    assert not make(AccumulateStep(4), bs=bs).check_accumulation().causes

# batches that cannot be cut, and rows that belong together
def several(os): return torch.stack([o[0] for o in os]),torch.cat([o[1] for o in os]),torch.stack([o[2] for o in os])
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.f,self.h = nn.Sequential(*[nn.Sequential(nn.Linear(6,6), nn.Tanh()) for _ in range(4)]),nn.Linear(6,3)
    def forward(self, x, u): return self.h(self.f(x)),self.h(self.f(u))
def two(mean): return lambda p,y: F.cross_entropy(p[0], y) + mean(p[1].softmax(1))
def unlabelled(*cbs, k=7, mean=lambda p: p.pow(2).mean(), **kwargs):
    torch.manual_seed(0)
    y = features(40, k*6).view(40, k, 6),classes(40)
    return make(*cbs, x=features(40), y=y, n_inp=2, model=Two().double(), loss=two(mean), create_batch=several, **kwargs)

@pytest.mark.parametrize('k', [2,3,7])
@pytest.mark.parametrize('cb', [GradientCheckpointing, OffloadActivations])
def test_what_does_not_cut_needs_no_cut(cb, k, capsys):
    a,b = (trained(unlabelled(*cbs, bs=16, k=k)) for cbs in ((),(cb(),)))
    assert torch.equal(a, b)
    check = unlabelled(cb(), bs=16, k=k).check_accumulation()
    assert check.error==0 and not check.causes

@pytest.mark.parametrize('k', [2,3,7])
def test_batches_that_cannot_be_cut(k):
    "They are compared as they are with the large one that the loader makes of the same samples"
    check = unlabelled(AccumulateStep(2), k=k).check_accumulation()
    assert check.error<1e-12 and 'the batch that the loader makes of them' in check.compared
    assert rel(trained(unlabelled(AccumulateStep(2), k=k)), trained(unlabelled(bs=8, k=k)))<TOL

def test_batches_that_cannot_be_cut_with_a_cause():
    check = unlabelled(AccumulateStep(2), mean=lambda p: p.pow(2).mean().sqrt()).check_accumulation()
    assert kinds(check)==['loss']

def triplets(p, y):
    a,b,c = p.view(-1, 3, p.shape[1]).unbind(1)
    return F.relu((a-b).pow(2).sum(1)-(a-c).pow(2).sum(1)+1).mean()
def pairs(p, y): return (p[::2]-p[1::2]).pow(2).mean()
def fours(p, y): return p.view(-1, 4, p.shape[1]).std(1).mean()
def halves_in_turn(os): return torch.stack([o[0] for o in os]+[2*o[0] for o in os]),torch.stack([o[1] for o in os])
def both_halves(p, y):
    a,b = p.chunk(2)
    return (a-b).pow(2).mean()+F.cross_entropy(a, y)

@pytest.mark.parametrize('loss,bs', [(triplets,6), (triplets,3), (triplets,9), (pairs,4), (pairs,2), (pairs,6), (fours,4), (fours,8)])
def test_rows_that_belong_together(loss, bs):
    "Windows of whole batches are exact, and the check says so"
    a,b = trained(make(AccumulateStep(2), loss=loss, bs=bs, n=72)),trained(make(loss=loss, bs=2*bs, n=72))
    assert rel(a, b)<TOL
    assert make(AccumulateStep(2), loss=loss, bs=bs, n=72).check_accumulation().error<1e-12

def test_two_halves():
    a,b = (make(*cbs, loss=both_halves, bs=bs, create_batch=halves_in_turn) for cbs,bs in (((AccumulateStep(2),),4),((),8)))
    assert rel(trained(a), trained(b))<TOL
    assert make(AccumulateStep(2), loss=both_halves, create_batch=halves_in_turn).check_accumulation().error<1e-12

def test_the_learners_own_error():
    "If the learner takes no samples at all, its own error comes, with the name of the check"
    def loss(p, y): raise RuntimeError('no such thing')
    with pytest.raises(RuntimeError, match='no such thing') as e: make(AccumulateStep(2), loss=loss).check_accumulation()
    assert 'check_accumulation' in ' '.join(e.value.__notes__)

# callbacks
class Scheduled(Callback):
    order,run_valid = 60,False
    def __init__(self, kind): self.kind = kind
    def before_fit(self):
        opt = self.opt.opt
        self.s = {'one cycle':lambda: OneCycleLR(opt, max_lr=.1, total_steps=self.learn.n_steps(self.n_epoch)),
                  'steps':lambda: StepLR(opt, 2), 'exponential':lambda: ExponentialLR(opt, .9)}[self.kind]()
    def after_batch(self): self.s.step()

@pytest.mark.parametrize('opt', [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize('fitted', [False, True])
@pytest.mark.parametrize('kind', ['one cycle','steps','exponential'])
def test_a_scheduler_of_pytorch(kind, fitted, opt):
    "It finds the learner's own optimizer, which is as before afterwards, its groups and its state too"
    def learner(): return make(Scheduled(kind), AccumulateStep(4), opt=partial(OptimWrapper, opt=opt))
    learn,plain = learner(),learner()
    if fitted: trained(learn, 1); trained(plain, 1)
    check = learn.check_accumulation()
    assert check.error<1e-12 and not check.causes
    assert torch.equal(trained(learn), trained(plain))

class Sets(Callback):
    "Sets the groups of the optimizer in `before_fit`"
    def __init__(self, how): self.how = how
    def before_fit(self):
        if self.how=='hyper': self.opt.set_hyper('lr', .5)
        elif self.how=='groups': self.opt.opt.param_groups = [dict(g, lr=.5) for g in self.opt.opt.param_groups]
        elif self.how=='in place': self.opt.opt.param_groups[0]['lr'] = .5
        elif self.how=='added': self.opt.opt.add_param_group(dict(params=[nn.Parameter(torch.ones(2))], lr=.5))
        elif self.how=='taken': del self.opt.opt.param_groups[0]['params'][0]

@pytest.mark.parametrize('fitted', [False, True])
@pytest.mark.parametrize('how', ['hyper','groups','in place','added','taken'])
def test_groups_that_a_callback_sets(how, fitted):
    learn = make(AccumulateStep(4), opt=partial(OptimWrapper, opt=torch.optim.SGD))
    if fitted: trained(learn, 1)
    else: learn.create_opt()
    def groups(): return [(id(g), [id(p) for p in g['params']], {k:v for k,v in g.items() if k!='params'}) for g in learn.opt.opt.param_groups]
    was = groups()
    learn.add_cb(Sets(how)).check_accumulation()
    assert groups()==was

class SetsLoss(Callback):
    def __init__(self, f): self.f = f
    def before_fit(self): self.learn.loss_func = self.f
class InTheEvent(SetsLoss):
    order = 60
class Method(Callback):
    def before_fit(self): self.learn.loss_func = self.mean
    def mean(self, p, y): return masked(p, y)

@pytest.mark.parametrize('cb', [lambda: SetsLoss(masked), lambda: InTheEvent(masked), Method, lambda: SetsLoss(hard),
                                lambda: SetsLoss(lambda p, y: masked(p, y))])
def test_a_loss_that_a_callback_sets(cb):
    check = make(cb(), AccumulateStep(2), bs=8).check_accumulation()
    assert kinds(check)==['loss'] and 'rewrite' not in str(check), check

class Draws(Callback):
    def __init__(self, f): self.f = f
    def before_batch(self): self.learn.xb = (self.xb[0]*self.f(),)

@pytest.mark.parametrize('f', [lambda: np.random.uniform(.5, 1.5), lambda: random.uniform(.5, 1.5), lambda: torch.rand(1).item()+.5,
                               lambda: np.random.normal(), lambda: random.choice([.5,1.5,2.5])])
def test_draws_in_a_callback(f):
    "They are found at the callback, and are no dropout"
    check = make(Draws(f), AccumulateStep(2), bs=8).check_accumulation()
    assert [(o.kind,o.where) for o in check.causes]==[('augmentation','Draws')]

# what it says
class Ema(nn.Module):
    "What exact slices change, though it is no batch norm"
    def __init__(self): super().__init__(); self.register_buffer('m', torch.zeros(5))
    def forward(self, x): return x-x.mean(0)

def test_says_no_size_that_has_nothing_to_do_with_it():
    model = nn.Sequential(nn.Linear(6,5), Ema(), nn.BatchNorm1d(5), nn.Linear(5,3)).double()
    check = make(MicroBatch(4, exact=True), model=model, bs=16).check_accumulation()
    assert 'unknown' in kinds(check) and 'yours' not in str(check)
