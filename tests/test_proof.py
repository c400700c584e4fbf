"""Before its first step, a learner tries on copies whether it trains as the whole batch does.

An ordinary model is proved, and nothing of the learner moves. test_kinds has the models that are refused."""
import gc,re,signal,sys,threading,time,warnings,weakref
from nets import *
from kinds import Odd
from fastai_accum.all import *
from fastai_accum.modes import Coins,middle
from fastai_accum.proof import dry as the_record
from fastai_accum.proof.dry import Dry
from fastai_accum.slices import Refused

images = torch.randn(20,3,16,16, generator=torch.Generator().manual_seed(0))

def net(*more):
    torch.manual_seed(2)
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(.2)), *more,
                         nn.Sequential(nn.Flatten(), nn.Linear(196, 8), nn.Tanh()), nn.Linear(8, 3))

def learner(model, *cbs, n=20, bs=8, dls=None, **kwargs):
    dls = dls or make_dls(n, bs, x=images[:n], y=classes(n))
    return quiet(Learner(dls, model, nn.CrossEntropyLoss(), SGD, lr=.1, cbs=L(cbs), **kwargs))

def n_proofs(capsys): return capsys.readouterr().out.count('is proved on your model')

ways = dict(exact=lambda m: MicroBatch(3, exact=True), coupled=lambda m: MicroBatch(3, coupled=True),
            checkpointing=lambda m: GradientCheckpointing([m[0]]))

def test_the_middle_of_each_range():
    "What random draws return where a trial leaves chance out"
    with Coins(middle):
        drawn = [torch.rand(1), torch.empty(1).uniform_(2, 4), torch.randint(2, 6, (1,)), torch.randn(1),
                 torch.empty(1).exponential_(4), torch.empty(1).normal_(3, 2), torch.bernoulli(torch.tensor([.25])),
                 F.dropout(torch.ones(1))]
    assert [o.item() for o in drawn]==[.5, 3, 4, .5, .25, 4, .25, 1]

def test_a_hook_that_knows_the_learner():
    "It is the user's, and mixes samples"
    learn = learner(net(), MicroBatch(3, exact=True))
    def epoch(): return learn.epoch
    def hook(m, xs, out): epoch(); return out-out.mean(0)
    learn.model[1].register_forward_hook(hook)
    refused(learn, 'is not possible', Refused)

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w): return w.clone()
    @staticmethod
    def backward(ctx, g): return g/g.norm()
class Large(nn.Linear):
    def forward(self, x): return F.linear(x, Backward.apply(self.weight), self.bias)

def test_large_weights_are_compared_for_one_batch(monkeypatch):
    monkeypatch.setattr(the_record, '_large', 100)   # all but those of the small layers
    m = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Flatten(), Large(196, 8), nn.Linear(8, 3))
    refused(learner(m, MicroBatch(3, coupled=True)), "the gradient.*It begins in the Large '2'", Refused)
    assert all(p.grad is None for p in m.parameters())

@each(k=ways)
def test_nothing_is_disturbed(k):
    "A fit with the proof leaves what a fit without it leaves"
    def leaves(proves):
        m = net()
        learn = learner(m, ways[k](m))
        if not proves: learn.cbs[-1].prove = False
        set_seed(0)
        with accumulation(2): learn.fit(1)
        now,vs = left(learn),[sorted(vars(o)) for o in m.modules()]
        return [now[o] for o in ('drawn','globals','modes','hooks')],[o.grad for o in m.parameters()], \
               m.state_dict(),warnings.filters[:],sys.stdout,vs
    assert identical(leaves(True), leaves(False))

@pytest.fixture
def interrupts():
    "Ctrl-C raises KeyboardInterrupt, also where the tests run in the background, which ignores it"
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, was)

press = SimpleNamespace()   # global, or the proof would put it back

def presses(m, x):
    "Presses Ctrl-C in its first run in a trial, and goes on for half a minute"
    if threading.current_thread() is not threading.main_thread() and not press.n:
        press.n,end = 1,time.time()+30
        threading.Timer(.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        while time.time()<end: x = x+0
        press.ended = True
    return x

@each(k=ways)
def test_ctrl_c_ends_it_at_once(k, interrupts):
    "Also while a module runs; and nothing has moved"
    press.n,press.ended,was = 0,False,[]
    m = net(Odd(presses))
    before = at_order(-1000, before_batch=lambda cb: was.append(left(cb.learn)))
    learn = learner(m, ways[k](m) if k!='checkpointing' else GradientCheckpointing([m[1]]), before)
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert press.n and not press.ended
    was[-1]['attributes'] = left(learn)['attributes']   # some are lent in a batch
    assert_left(was[-1], learn)
    learn.fit(1)

def scaled(m, x, y, by): return y*by

def test_it_is_proved_again_when_something_changes(capsys):
    "By the modules and by what they run; each fit looks at the rest, such as a number of a layer or of a hook"
    m,made = net(),0
    m[0][0].register_forward_hook(scales := partial(scaled, by=1))
    learn = learner(m, MicroBatch(3, coupled=True))
    for change,n in [(noop,1), (lambda: m[0][0].requires_grad_(False), 1), (lambda: m[0][0].requires_grad_(True), 1),
                     (lambda: setattr(m[0][3], 'p', .3), 1), (lambda: scales.keywords.update(by=2), 1),
                     (lambda: m.append(nn.Linear(3, 3)), 2), (lambda: learn.micro_batch(4, coupled=True), 2),
                     (lambda: learn.micro_batch(4, exact=True), 3),
                     (lambda: m[0][0].register_forward_hook(lambda m, x, y: y), 4),
                     (lambda: setattr(m[0][0], 'forward', partial(type(m[0][0]).forward, m[0][0])), 5)]:
        change()
        learn.create_opt()
        learn.fit(1)
        made += n_proofs(capsys)
        assert made==n

ran = []   # when
def notes(m, x): ran.append(time.time()); return x

def test_a_line_says_how_far_it_is_and_the_epoch_does_not_count_it(capsys):
    ran.clear()
    learn = learner(net(Odd(notes)), MicroBatch(4, coupled=True), n=8)
    learn.add_cb(ProgressCallback())
    learn.fit(1)
    out = capsys.readouterr().out
    assert len(re.findall(r'is tried on your model, about \d+ s more', out))==5, out
    assert learn.recorder.start_epoch>ran[0]   # it began before the trial, and the trial's time is not its own

def single(m, x):
    if x.dtype==torch.float64: raise RuntimeError('expected float32')
    return x
def fine_tunes(learn):
    "With all parameters of the optimizer, also those that are frozen at first"
    learn.fine_tune(1, freeze_epochs=1)
    learn.freeze()
    learn.fit(1)

def twice(learn): learn.fit(2); learn.fit(1)
def counts(m, x):
    "Changes numbers by itself, which is no reason to prove it again, and a flag, which is"
    m.n,m.is_first,m.last = m.n+1,False,m.last+.5
    return x
def counting(): return net(Odd(counts, n=0, is_first=True, last=0.))

@each(case=[*((net, o, twice, 1) for o in ways.values()), (net, ways['exact'], fine_tunes, 1),
            (counting, ways['checkpointing'], twice, 2),
            (net, lambda m: MicroBatch(8, exact=True), twice, 0),   # a batch of 8 is not cut
            (lambda: net(Odd(single)), ways['exact'], twice, 1)])   # tried in its own precision if float64 fails
def test_how_often_it_is_proved(case, monkeypatch, capsys):
    "Also in Python 3.14, where `copy` has lost a private function, and where the precision is set by its new name"
    model,way,fit,n = case
    if hasattr(torch.backends, 'fp32_precision'): monkeypatch.setattr(torch.backends, 'fp32_precision', 'ieee')
    monkeypatch.delattr(sys.modules['copy'], '_deepcopy_atomic', raising=False)
    fit(learner(m := model(), way(m), splitter=halves))
    said = re.findall(r'is proved on your model: 4 samples.* What is proved: https://', capsys.readouterr().out)
    assert len(said)==n

def nearest(pred, y): return sum((p-r['box']).pow(2).mean() for p,r in zip(pred, y))/len(y)

@each(bs=[1,4], exact=[False,True])
def test_images_in_lists(bs, exact):
    "A trial of three images does not take their three channels for samples; nor are the two rows of a box samples"
    def of_batch(os): return [x.expand(6,3).T for x,_ in os],[dict(box=float(y)+features(2,3)) for _,y in os]
    def dls(n):
        data = list(zip(features(20, 3), classes(20)))
        return DataLoaders(*[DataLoader(data, bs=n, create_batch=of_batch) for _ in range(2)])
    m = Odd(lambda m, xs: [o.expand(2,3) for o in m.net(torch.stack([x.mean(1) for x in xs]))[:,None]],
            net=(normed if exact else layers)(d=3))
    whole(lambda: MicroBatch(bs, coupled=not exact, exact=exact), 20, 8, dls=dls, model=lambda: deepcopy(m),
          loss_func=nearest)
    # in slices without `exact`, too
    if not exact: whole(lambda: MicroBatch(bs), 20, 8, dls=dls, model=lambda: deepcopy(m), loss_func=nearest)

@each(value=[0.,1.])
def test_constant_images(value):
    "Behind a batch norm their gradient is nothing but rounding, which says nothing of slices"
    def conv(n): return nn.Conv2d(n, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(*conv(3), *conv(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8,3))
        dls = of_batches([(torch.full((8,3,12,12), value),classes(8))])
        learner(model, MicroBatch(4, exact=True), dls=dls).fit(1)

def leads_to(o): return lambda: o

@pytest.mark.parametrize('k', ways)
def test_one_copy_at_a_time(k, monkeypatch):
    """The tensors of a run are freed before the next one begins, and nothing waits for Python's collector. The model
    may lead to its learner, as a hook does, and goes with it"""
    m,copied,copies,alive = net(),Dry.copied,[],[]
    at = m[0][0].weight.data_ptr()
    def noted(self, o):
        res = copied(self, o)
        if o.data_ptr()==at and o.dtype==torch.float32:
            alive.append(sum(c() is not None for c in copies))
            copies.append(weakref.ref(res))
        return res
    monkeypatch.setattr(Dry, 'copied', noted)
    learn,weight = learner(m, ways[k](m)),weakref.ref(m[0][0].weight)
    m.lead = leads_to(learn)
    gc.disable()
    try: learn.fit(1)
    finally: gc.enable()
    assert len(alive)>1 and not any(alive) and not any(o() is not None for o in copies)
    del m,learn
    gc.collect()
    assert weight() is None
