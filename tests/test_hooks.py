"""A callback has a hook in the model, or something is replaced in the middle of a fit or for the forward pass only.

Blocks and slices that run again see what the first run saw. Each case is as plain training, or refused by name."""
import pytest
from dataclasses import dataclass
from functools import lru_cache
from nets import *
from fastai_accum.all import *
from fastai_accum.slices import Refused

ways = dict(checkpointing=GradientCheckpointing, coupled=lambda: MicroBatch(4, coupled=True),
            exact=lambda: MicroBatch(4, exact=True))
slices_refuse = dict(coupled=Refused, exact=Refused)

def net(norm=False):
    torch.manual_seed(0)
    def lin(n): return nn.Linear(n, 8, bias=not norm)   # before a batch norm, the gradient of a bias is only rounding
    inner = [nn.Sequential(lin(8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(lin(6), *inner, nn.Linear(8,3)).double()

def fit(*cbs, make=net): return train(cbs, 16, 48, lambda l: l.fit(3), model=make, opt_func=SGD, lr=.1, **one_group)

@dataclass(slots=True)
class Slots: n:int = 0

class Log(list): __slots__ = 'name',

class Hooked(Callback):
    "Inside of a block"
    def before_fit(self):
        self.n,self.s,self.t,self.bytes,self.slots = 0,1.,torch.ones(8).double(),bytearray(1),Slots()
        self.array,self.log,self.seen = np.frombuffer(self.bytes, np.uint8),Log(),[]   # which shares memory
        self.g,self.r = torch.Generator().manual_seed(3),random.Random(1)
        self.h = self.model[1][0].register_forward_hook(self.f)
    def before_batch(self): self.p,self.done,self.fs = torch.arange(len(self.y)).roll(3),False,[]
    def after_fit(self): self.h.remove()

def hooked(f, **more): return type('Hooked', (Hooked,), dict(f=lambda self, m, xs, o: f(self, o), **more))
def once(self, o):
    if not self.done: self.done = True; return 1.5*o
def running(self, o): self.s = .9*self.s+.1*float(o.detach().abs().mean()); return o/self.s
def in_place(self, o): self.t.mul_(.9).add_(.1*o.detach().abs().mean(0)); return o/self.t
def counts(self, o): self.n += 1; return o*(1+.01*self.n)
def in_slots(self, o): return counts(self.slots, o)
def in_a_list(self, o): self.log.append(1); return o*(1+.01*len(self.log))
def in_bytes(self, o): self.bytes[0] += 1; return o*(1+.01*self.bytes[0])
def keeps(self, o): self.o = o
def lists(self, o): self.fs.append(o)
def mean(self, o): self.mu = o.detach().mean()
def rate(self): self.opt.set_hyper('lr', .1*float(self.mu.abs()))
def forgets(self): self.mu = None; Hooked.before_batch(self)
def penalty(f):
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad*f(self)
    return dict(after_loss=after_loss)

hooked_by = dict(   # what a callback does with what a block returns, and who refuses it
    mixes=(hooked(lambda self, o: .8*o+.2*o[self.p]), slices_refuse),
    centres=(hooked(lambda self, o: o-.4*o.mean(0)), slices_refuse),
    running=(hooked(running), slices_refuse),
    in_place=(hooked(in_place), dict(checkpointing=Refused, **slices_refuse)),
    in_the_loss=(hooked(mean, **penalty(lambda self: 1+self.mu.abs())), slices_refuse),
    once=(hooked(once), {}), **{f.__name__:(hooked(f), {}) for f in (counts,in_slots,in_bytes)},
    in_a_list=(hooked(in_a_list), slices_refuse),   # each slice adds an entry
    noise=(hooked(lambda self, o: o+.1*torch.randn(8, generator=self.g, dtype=o.dtype)), {}),
    noise_of_rows=(hooked(lambda self, o: o+.1*torch.randn(o.shape, generator=self.g, dtype=o.dtype)),
                   dict(coupled=Refused)),
    python=(hooked(lambda self, o: o*(1+self.r.random())), {}),
    keeps=(hooked(keeps, **penalty(lambda self: 1+self.o.mean(0).pow(2).sum())), {}),
    lists=(hooked(lists, **penalty(lambda self: 1+torch.cat(self.fs).mean(0).pow(2).sum())), {}),
    read_by_a_step=(hooked(mean, after_step=torch.no_grad()(rate)), slices_refuse),
    read_after_it_was_set=(hooked(mean, before_batch=forgets), {}),
    read_by_a_log=(hooked(mean, after_batch=lambda self: self.seen.append(float(self.mu))), {}),
    looks=(hooked(mean), {}), rows=(hooked(lambda self, o: 1.2*o), {}))

def at(f, event='before_batch', n=0):
    "In the second epoch, at its `n`th batch"
    def g(cb):
        if cb.training and cb.epoch==1 and (event!='before_batch' or cb.iter==n): f(cb.learn)
    return lambda: [Callback(**{event:g})]
def within(do, undo, until='after_pred'):
    return lambda: [Callback(**{'before_batch':lambda cb: do(cb.model), until:lambda cb: undo(cb.model)})]

def statistics(learn):
    for k in 'running_mean','running_var': setattr(learn.model[1][1], k, getattr(learn.model[1][1], k)+1)
def another_model(learn):
    learn.model = deepcopy(learn.model)
    learn.opt.param_lists = L([L(learn.model.parameters())])
def another_layer(learn): learn.model[2][-1] = nn.Sigmoid()
def another_forward(learn): f = learn.model[2].forward; learn.model[2].forward = lambda x: f(x)-.1
def mixing_forward(learn): f = learn.model[2].forward; learn.model[2].forward = lambda x: f(x)-f(x).mean(0)
def mixing_hook(learn): learn.model[1][0].register_forward_hook(lambda m, xs, o: o-.3*o.mean(0))
def forward_of_a_batch(m): m.was = m[2].forward; m[2].forward = lambda x: m.was(x)*1.3
def own_forward(m): m[2].forward = m.was
def weight_of_a_batch(m): m.w = m[2][0].weight; m[2][0].weight = nn.Parameter(m.w.detach()*1.1)
def own_weight(m): m[2][0].weight = m.w
def data_of_a_batch(m): m.w = m[2][0].weight.data; m[2][0].weight.data = m.w*1.1
def own_data(m): m[2][0].weight.data = m.w

with_norm = partial(net, True)
changes = dict(   # what, the model, and who refuses it; slices of `coupled` see their own batch norm
    **{k:(make, net, by) for k,(make,by) in hooked_by.items()},
    statistics=(at(statistics, 'before_train'), with_norm, {}),
    another_model=(at(another_model, 'before_train'), with_norm, {}),
    another_layer=(at(another_layer, n=1), net, {}), another_forward=(at(another_forward, n=1), net, {}),
    mixing_forward=(at(mixing_forward, n=1), net, slices_refuse),
    mixing_hook=(at(mixing_hook, n=1), net, slices_refuse),
    eps=(within(lambda m: setattr(m[1][1], 'eps', .5), lambda m: setattr(m[1][1], 'eps', 1e-5)), with_norm, {}),
    mode=(within(lambda m: m[1].eval(), lambda m: m[1].train()), with_norm, {}),
    forward=(within(forward_of_a_batch, own_forward), net, {}), weight=(within(weight_of_a_batch, own_weight), net, {}),
    # the backward pass would compute again with other weights
    data=(within(data_of_a_batch, own_data), net, dict(checkpointing=Refused, **slices_refuse)),
    data_until_backward=(within(data_of_a_batch, own_data, 'after_backward'), net, {}))

cases = [(k,w) for k,(_,make,_) in changes.items() for w in ways if w!='coupled' or make is net]

@pytest.mark.filterwarnings('ignore::fastai_accum.refusals.NotProved')
@pytest.mark.parametrize('change,way', cases)
def test_changes_in_a_fit(change, way):
    cbs,make,refused = changes[change]
    def run(*more): return fit(*more, *L(cbs()), make=make)
    plain = run()
    if way in refused:
        with pytest.raises(refused[way], match='GradientCheckpointing|MicroBatch'): run(ways[way]())
    else: assert_same(run(ways[way]()), plain)

def test_a_retry_puts_callbacks_back():
    "Memory runs out in the first attempt: what a callback holds is as if that attempt had not been"
    class Ema(Callback):
        run_valid = False
        def before_fit(self): self.m = torch.zeros(3).double()
        def after_pred(self):
            self.m.mul_(.8).add_(.2*self.pred.detach().mean(0))
            self.learn.pred = self.pred-self.m
    class Teacher(Callback):
        "Has a batch norm, far inside"
        run_valid = False
        def before_fit(self):
            torch.manual_seed(1)
            self.t = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(6,3), nn.BatchNorm1d(3)))).double()
        def after_loss(self): self.learn.loss_grad = self.loss_grad+F.mse_loss(self.pred, self.t(self.x))
    a,b = [fit(MicroBatch(bs), Teacher(), make=lambda: limited(net(), most, backward=True))
           for bs,most in (('auto',6),(4,99))]
    close(*[[*l.model.parameters(), *l.teacher.t.state_dict().values()] for l in (a,b)])
    moves = type('Moves', (Teacher,), dict(before_batch=lambda self: self.t[0][0][0].weight.data.mul_(.9)))
    with pytest.raises(RuntimeError, match='a callback had moved the weights of a model of its own; pass a bs'):
        fit(MicroBatch(), moves(), make=lambda: limited(net(), 6, backward=True))
    for kw in dict(coupled=True),dict(exact=True):
        cut = fit(MicroBatch(prove=False, valid=False, **kw), Ema(), make=lambda: limited(net(), 6, backward=True))
        assert_same(cut, fit(Ema(), make=lambda: limited(net(), 99)))

def test_nothing_stays_in_a_cache():
    "A table of a function is in float32 after a proof and a check, and a list that refuses to be cleared is put back"
    def model():
        torch.manual_seed(0)
        return Made(lambda m, x: m.b(m.a(x)+m.t(8)), a=nn.Linear(6,8), b=nn.Sequential(nn.Linear(8,3), nn.Tanh()),
                    t=lru_cache(partial(torch.linspace, 0, 1)))
    class Log(list):
        def clear(self): raise TypeError('a log is not cleared')
    def run(*cbs, check=False):
        dls = make_dls(48, 16, x=features(48).float(), shuffle=False)
        log = Callback(before_batch=lambda cb: cb.log.append(1))
        learn = make_learner(dls, model(), opt_func=SGD, cbs=[*cbs, log], **one_group)
        learn.recorder.smooth_loss,log.log = AvgSmoothLoss(),Log()
        if check: learn.check_accumulation(); assert not log.log
        learn.fit(1)
        return list(learn.model.parameters())
    plain = run()
    for p in run(check=True),run(MicroBatch(4, coupled=True)): close(p, plain, TOL32)
