"""Before its first step, a learner tries on copies whether it trains as the whole batch does.

A model that looks at the batch is refused, an ordinary one is proved, and nothing of the learner moves. test_kinds has
the models that were silently wrong once."""
import gc,re,signal,sys,threading,time,warnings,weakref
from harness import *
from fastai_accum.all import *
from fastai_accum.proof import record as the_record
from fastai_accum.proof.dry import Dry,planning
from fastai_accum.slices import Refused
from torch.utils.checkpoint import checkpoint

images = torch.randn(20,3,16,16, generator=torch.Generator().manual_seed(0))

class Center(nn.Module):
    def forward(self, x): return x-x.mean(0)

def net(*more):
    torch.manual_seed(2)
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(.2)), *more,
                         nn.Sequential(nn.Flatten(), nn.Linear(196, 8), nn.Tanh()), nn.Linear(8, 3))

def learner(model, *cbs, n=20, bs=8, dls=None, **kwargs):
    dls = dls or make_dls(n, bs, x=images[:n], y=classes(n))
    learn = Learner(dls, model, nn.CrossEntropyLoss(), SGD, lr=.1, cbs=L(cbs), **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def n_proofs(capsys): return capsys.readouterr().out.count('is proved on your model')

ways = dict(exact=lambda m: MicroBatch(3, exact=True), coupled=lambda m: MicroBatch(3, coupled=True),
            checkpointing=lambda m: GradientCheckpointing([m[0]]))

@pytest.mark.parametrize('k', ways)
def test_an_ordinary_model_is_proved_once(k, capsys):
    m = net()
    learn = learner(m, ways[k](m))
    learn.fit(2)
    learn.fit(1)
    out = capsys.readouterr().out
    assert out.count('is proved on your model: 4 samples')==1
    assert 'What is proved: https://' in out

@each(k=ways, n=[2,3])
def test_few_samples(k, n):
    m = net()
    learner(m, ways[k](m), n=n, bs=n).fit(1)

class Moves(nn.Module):
    "Changes its weight in `forward`, so a second run finds another one"
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
    def forward(self, x):
        self.w.data += .1
        return x*self.w.detach().clone()

@pytest.mark.parametrize('k,odd,where', [('coupled',Center,"the Center '1'"), ('checkpointing',Moves,'')])
def test_refused_before_anything_moves(k, odd, where):
    m = net(odd())
    cb = ways['coupled'](m) if k=='coupled' else GradientCheckpointing([m[1]])
    learn = learner(m, cb)
    was = {k:v.clone() for k,v in m.state_dict().items()}
    with pytest.raises(ValueError, match=f'is not possible.*{where}.*OffloadActivations'): learn.fit(1)
    assert all(torch.equal(v, was[k]) for k,v in m.state_dict().items())
    assert all(p.grad is None for p in m.parameters())
    learn.remove_cb(cb)
    learn.fit(1)

class Branches(nn.Module):
    "Takes another way if a value is large"
    def forward(self, x): return x-x.mean(0) if x.abs().max()>8 else x

class KeepsSize(nn.Module):
    def forward(self, x): self.bs = float(len(x)); return x

def recomputing():
    "As the models of transformers say it"
    m = Center()
    m.gradient_checkpointing = True
    return m

@pytest.mark.parametrize('odd,says', [
    (Center, "It begins in the Center '1'"), (Branches, "It begins in the Branches '0'"),
    (KeepsSize, 'model.1.bs .*take a local variable'),
    (recomputing, r'call gradient_checkpointing_disable\(\) first')], ids=['center','branch','size','recomputes'])
def test_a_refusal_says_where_it_begins_and_what_to_do(odd, says):
    "Also where slices wait at norms, and the model runs for a plan before"
    m = net(odd()) if odd is not Branches else nn.Sequential(odd(), *net())   # before the norm
    with pytest.raises(ValueError, match=says): learner(m, MicroBatch(3, exact=True)).fit(1)

def what_is_left(learn):
    ms = list(learn.model.modules())
    return (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()), torch.get_default_dtype(),
            [m.training for m in ms], [len(m._forward_hooks)+len(m._forward_pre_hooks) for m in ms],
            [p.grad for p in learn.model.parameters()], {k:v.tolist() for k,v in learn.model.state_dict().items()},
            torch.is_grad_enabled(), warnings.filters[:], sys.stdout, [sorted(vars(m)) for m in ms])

@each(k=ways)
def test_nothing_is_disturbed(k):
    "A fit with the proof leaves what a fit without it leaves"
    def left(proves):
        m = net()
        learn = learner(m, ways[k](m))
        if not proves: learn.cbs[-1].prove = False
        set_seed(0)
        with accumulation(2): learn.fit(1)
        return [[g if g is None else g.tolist() for g in o] if i==6 else o for i,o in enumerate(what_is_left(learn))]
    assert left(True)==left(False)

@pytest.fixture
def interrupts():
    "Ctrl-C raises KeyboardInterrupt, also where the tests run in the background, which ignores it"
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, was)

class Presses(nn.Module):
    "Presses Ctrl-C in its first run in a trial, and goes on for half a minute"
    pressed,ended = False,False
    def forward(self, x):
        if threading.current_thread() is not threading.main_thread() and not Presses.pressed:
            Presses.pressed,end = True,time.time()+30
            threading.Timer(.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
            while time.time()<end: x = x+0
            Presses.ended = True
        return x

@each(k=ways)
def test_ctrl_c_ends_it_at_once(k, interrupts):
    "Also while a module runs; and nothing has moved"
    Presses.pressed = Presses.ended = False
    m = net(Presses())
    class Before(Callback):
        order = -1000
        def before_batch(self): self.was = what_is_left(self.learn)
    learn = learner(m, ways[k](m) if k!='checkpointing' else GradientCheckpointing([m[1]]), Before())
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert Presses.pressed and not Presses.ended
    assert what_is_left(learn)[:-3]==learn.before.was[:-3]   # without what is lent in a batch
    learn.fit(1)

def test_it_is_proved_again_when_something_changes(capsys):
    m,made = net(),0
    learn = learner(m, MicroBatch(3, coupled=True))
    for change,n in [(noop,1), (lambda: m[0][0].requires_grad_(False), 1), (lambda: m[0][0].requires_grad_(True), 1),
                     (lambda: setattr(m[0][3], 'p', .3), 2), (lambda: setattr(m[0][3], 'p', 0.), 3),
                     (lambda: m.append(nn.Linear(3, 3)), 4), (lambda: learn.micro_batch(4, coupled=True), 4),
                     (lambda: learn.micro_batch(4, exact=True), 5)]:
        change()
        learn.create_opt()
        learn.fit(1)
        made += n_proofs(capsys)
        assert made==n

def test_fine_tune_is_proved_once(capsys):
    "With all parameters of the optimizer, also those that are frozen at first"
    learn = learner(net(), MicroBatch(3, exact=True), splitter=lambda m: [params(m[0]), params(m[1:])])
    learn.fine_tune(1, freeze_epochs=1)
    learn.freeze()
    learn.fit(1)
    assert n_proofs(capsys)==1

class Slow(nn.Module):
    def forward(self, x): Slow.ran.append(time.time()); time.sleep(.3); return x

def test_a_line_says_how_far_it_is_and_the_epoch_does_not_count_it(capsys):
    Slow.ran = []
    learn = learner(net(Slow()), MicroBatch(4, coupled=True), n=8)
    learn.add_cb(ProgressCallback())
    learn.fit(1)
    out = capsys.readouterr().out
    left = list(map(int, re.findall(r'is tried on your model, about (\d+) s more', out)))
    assert len(left)==5, out
    assert learn.recorder.start_epoch>Slow.ran[0]   # it began before the trial, and the trial's time is not its own

def test_large_weights_are_compared_for_one_batch(monkeypatch):
    "A gradient that looks at the batch is seen in the first batch"
    monkeypatch.setattr(the_record, '_large', 100)   # all but those of the small layers
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w): return w.clone()
        @staticmethod
        def backward(ctx, g): return g/g.norm()
    class Large(nn.Linear):
        def forward(self, x): return F.linear(x, Backward.apply(self.weight), self.bias)
    m = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Flatten(), Large(196, 8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="the gradient.*It begins in the Large '2'"):
        learner(m, MicroBatch(3, coupled=True)).fit(1)

class Breaks(nn.Module):
    "Cannot be tried"
    def forward(self, x):
        if planning.get(): raise IndexError('not here')
        return x

def test_what_cannot_be_tried_is_said_once():
    learn = learner(net(Breaks()), MicroBatch(3, coupled=True))
    with pytest.warns(UserWarning, match='was not tried on your model.*not here.*not known'): learn.fit(1)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit(1)
    learn = learner(net(Breaks()), MicroBatch(3, exact=True))   # which is refused, with the line that trains without
    with pytest.raises(ValueError, match=r'not here.*learn.micro_batch\(3, exact=True, prove=False\)'): learn.fit(1)

def test_a_batch_that_is_not_cut_needs_no_proof(capsys):
    learner(net(), MicroBatch(8, exact=True)).fit(1)
    assert not n_proofs(capsys)

def test_it_is_tried_in_its_own_precision_if_float64_fails(capsys):
    class Single(nn.Module):
        def forward(self, x):
            if x.dtype==torch.float64: raise RuntimeError('expected float32')
            return x
    learner(net(Single()), MicroBatch(3, exact=True)).fit(1)
    assert n_proofs(capsys)==1

def test_dropped_out_samples_do_not_hide_a_mistake():
    "One mask in fifty hides a row: the trial makes that frequent"
    class Rare(nn.Module):
        def forward(self, x):
            keep = (torch.rand(len(x), device=x.device)>.02).to(x)
            return x*keep[:,None,None,None] + (1-keep).sum()
    learn = learner(net(Rare()), MicroBatch(3, exact=True))
    with pytest.raises(ValueError, match='exact=True'): learn.fit(1)

def leads_to(o): return lambda: o

@each(way=ways)
def test_nothing_stays_in_memory(way):
    "A model may lead to its learner, as a hook does; neither it nor the copies of the proof stay"
    def sevens(): return [o for o in gc.get_objects() if type(o) is nn.Parameter and o.shape==(7,8)]
    m = net(nn.Sequential(nn.Flatten(), nn.Linear(196, 8), nn.Linear(8, 7), nn.Linear(7, 196),
                          nn.Unflatten(1, (4,7,7))))
    learn = learner(m, ways[way](m), n=8)
    m.lead = leads_to(learn)
    learn.fit(1)
    assert sevens()
    del m,learn
    gc.collect()
    assert not sevens()

# ---- what a model does with the number of samples that trains

class Ghost(nn.BatchNorm2d):
    "Batch norm over groups of `k` samples"
    k = 4
    def forward(self, x): return torch.cat([super(Ghost, self).forward(o) for o in x.split(self.k)])
class FromFour(nn.Module):
    "Centres a batch of four samples or more, which the trial on three does not see"
    def forward(self, x): return x-x.mean(0) if len(x)>=6 else x
class Chunks(nn.BatchNorm2d):
    "Batch norm over four parts of the batch, whatever its size"
    def forward(self, x): return torch.cat([super(Chunks, self).forward(o) for o in x.chunk(4)])
class LateDropout(nn.Module):
    def forward(self, x): return F.dropout(x, .3) if len(x)>=7 else x

@each(odd=[lambda: Ghost(4), FromFour, lambda: Chunks(4), LateDropout])
def test_another_number_of_samples(odd):
    learn = learner(net(odd()), MicroBatch(4, exact=True))
    with pytest.raises(ValueError, match='exact=True is not possible'): learn.fit(1)

class Clips(nn.Module):
    "Wants a multiple of four samples, as a video model of four clips does"
    def forward(self, x): return x+x.view(-1,4,*x.shape[1:]).flip(1).reshape(x.shape)

def test_a_multiple_of_four_samples(capsys):
    "Is tried on as many as a few slices have, and is exact"
    def trained(*cbs):
        dls = make_dls(16, 8, x=images[:16].double(), y=classes(16))
        learn = make_learner(dls, net(Clips()).double(), opt_func=SGD, cbs=cbs, lr=.1, splitter=params)
        torch.manual_seed(0)
        learn.fit(1)
        return learn
    # a bias before a batch norm has no gradient but rounding
    assert_same(trained(MicroBatch(4, exact=True)), trained(), but=('step.grads','opt'))
    assert n_proofs(capsys)==1

class Recomputes(nn.Module):
    "Checkpoints itself by PyTorch's function, in one of its two variants"
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(2)
        self.conv,self.norm,self.lin = nn.Conv2d(3, 4, 3, 2),nn.BatchNorm2d(4),nn.Linear(196, 3)
        self.reentrant = reentrant
    def block(self, x): return self.norm(self.conv(x)).relu()
    def forward(self, x):
        x = checkpoint(self.block, x.requires_grad_() if self.reentrant else x, use_reentrant=self.reentrant)
        return self.lin(x.flatten(1))

@each(reentrant=[True,False])
def test_a_model_that_checkpoints_itself_is_refused(reentrant):
    m = Recomputes(reentrant)
    with pytest.raises(Refused, match='exact=True is not possible'):
        learner(m, MicroBatch(3, exact=True)).fit(1)
    learner(m).fit(1)   # it is as it was

def test_coupled_and_exact_together_are_exact():
    def model():
        torch.manual_seed(0)   # without the bias, whose gradient would be rounding only
        return nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Dropout(.3), nn.Linear(5, 3)).double()
    same(lambda: MicroBatch(5, coupled=True, exact=True), bs=32, model=model)

class OwnBackward(Callback):
    "A second backward pass through the batch's predictions"
    def before_backward(self): (.1*self.pred.pow(2).mean()).backward(retain_graph=True)

@each(cb=[lambda: MicroBatch(3, exact=True), lambda: MicroBatch(3, coupled=True)])
def test_a_backward_pass_of_a_callback(cb):
    "Beside slices of a model without norms"
    same(cb, bs=12, large=12, n=48, also=OwnBackward)

def test_python_3_14(monkeypatch, capsys):
    "`copy` has lost a private function there, and the proof does not need it"
    monkeypatch.delattr(sys.modules['copy'], '_deepcopy_atomic')
    learner(net(), MicroBatch(3, exact=True)).fit(1)
    assert n_proofs(capsys)==1

at_16 = dict(number=lambda m,h: h*(2. if len(h)>=16 else 1.),
             dropout=lambda m,h: F.dropout(h, .5 if len(h)>=16 else .1),
             weights=lambda m,h: (m.a if len(h)>=16 else m.b)(h), norm=lambda m,h: m.norm(h) if len(h)>=16 else h)

class FromSixteen(nn.Module):
    "Does something else with 16 samples, with the same operations of PyTorch"
    def __init__(self, k, dim=0):
        super().__init__()
        self.k,self.dim,self.m = k,dim,small_model()
        self.a,self.b,self.norm = nn.Linear(3,3).double(),nn.Linear(3,3).double(),nn.BatchNorm1d(3).double()
    def forward(self, x): return at_16[self.k](self, self.m(x.transpose(0, self.dim)))

def refused_at_16(dls, model, cb):
    learn = make_learner(dls, model, cbs=cb, splitter=trainable_params)
    with pytest.raises(Refused, match='your batch of 32 samples is fine, but in slices of'): learn.fit(1)
    assert not learn.spy.steps

@drawn(4, k=at_16, bs=[8,1])
def test_numbers_and_weights_that_depend_on_the_size(k, bs):
    "Also where slices have one sample"
    refused_at_16(make_dls(64, 32), FromSixteen(k), MicroBatch(bs, exact=True))

def test_the_size_of_a_batch_that_is_split_in_another_way():
    def split(b, bs): return [(b[0][:,i:i+bs],b[1][i:i+bs]) for i in range(0, len(b[1]), bs)]
    dl = DataLoader([(features(32).T,classes(32))]*2, bs=None)
    refused_at_16(DataLoaders(dl, dl), FromSixteen('weights', dim=1), MicroBatch(8, exact=True, split=split))

def test_numbers_that_count_samples():
    "Such as a mean that is written by hand"
    class Means(nn.Module):
        def __init__(self): super().__init__(); self.m = small_model()
        def forward(self, x):
            h = self.m(x)
            by_hand = h.sum()/len(h) + h.sum()*(1/len(h)) + 0*torch.arange(1, len(h)+1).sum()
            return h + 0*by_hand.detach()
    same(lambda: MicroBatch(8, exact=True), bs=32, model=Means, splitter=trainable_params)

@each(value=[0.,1.])
def test_constant_images(value):
    "Behind a batch norm their gradient is nothing but rounding, which says nothing of slices"
    def conv(n): return nn.Conv2d(n, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(*conv(3), *conv(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8,3))
        dl = DataLoader([(torch.full((8,3,12,12), value),classes(8))], bs=None)
        learner(model, MicroBatch(4, exact=True), dls=DataLoaders(dl, dl)).fit(1)

@pytest.mark.parametrize('k', ways)
def test_one_copy_at_a_time(k, monkeypatch):
    "The tensors of a run are freed before the next one begins, and nothing waits for Python's collector"
    m,copied,copies,alive = net(),Dry.copied,[],[]
    weight = m[0][0].weight
    def noted(self, o):
        res = copied(self, o)
        if o.data_ptr()==weight.data_ptr() and o.dtype==torch.float32:
            alive.append(sum(c() is not None for c in copies))
            copies.append(weakref.ref(res))
        return res
    monkeypatch.setattr(Dry, 'copied', noted)
    gc.disable()
    try: learner(m, ways[k](m)).fit(1)
    finally: gc.enable()
    assert len(alive)>1 and not any(alive) and not any(o() is not None for o in copies)
