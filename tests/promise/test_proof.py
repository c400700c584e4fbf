"""Before its first step, a learner tries on copies whether it trains as the whole batch does.

A model that looks at the batch is refused, an ordinary one is proved, and nothing of the learner moves. tests/corners
has the models that were silently wrong once."""
import gc,pickle,re,signal,sys,threading,time,warnings,weakref
from harness import *
from fastai_accum.all import *
from fastai_accum import guard as the_guard,record as the_record
from fastai_accum.guard import compare
from fastai_accum.dry import planning
from fastai_accum.proof import Trial
from fastai_accum.slices import Refused
from torch.utils.checkpoint import checkpoint

images = torch.randn(20,3,16,16, generator=torch.Generator().manual_seed(0))

class Center(nn.Module):
    def forward(self, x): return x-x.mean(0)

def net(*more):
    torch.manual_seed(2)
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(.2)), *more,
                         nn.Sequential(nn.Flatten(), nn.Linear(196, 8), nn.Tanh()), nn.Linear(8, 3))

def learner(model, *cbs, n=20, bs=8):
    learn = Learner(make_dls(n, bs, x=images[:n], y=classes(n)), model, nn.CrossEntropyLoss(), SGD, lr=.1, cbs=L(cbs))
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

ways = dict(exact=lambda m: MicroBatch(3, exact=True), coupled=lambda m: MicroBatch(3, coupled=True),
            checkpointing=lambda m: GradientCheckpointing([m[0]]))

@pytest.fixture
def trials(monkeypatch):
    "Counts the proofs that are made"
    made = []
    monkeypatch.setattr(the_guard, 'compare', lambda *args: made.append(args) or compare(*args))
    return made

@pytest.mark.parametrize('k', ways)
def test_an_ordinary_model_is_proved_once(k, trials, capsys):
    m = net()
    learn = learner(m, ways[k](m))
    learn.fit(2)
    learn.fit(1)
    out = capsys.readouterr().out
    assert len(trials)==out.count('is proved on your model: 4 samples')==1
    assert 'What is proved: https://' in out

@pytest.mark.parametrize('n', [2,3,20])
@pytest.mark.parametrize('k', ways)
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

def state(learn):
    ms = list(learn.model.modules())
    return (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()), torch.get_default_dtype(),
            [m.training for m in ms], [len(m._forward_hooks)+len(m._forward_pre_hooks) for m in ms],
            [p.grad for p in learn.model.parameters()], {k:v.tolist() for k,v in learn.model.state_dict().items()},
            torch.is_grad_enabled(), [sorted(vars(m)) for m in ms], warnings.filters[:], sys.stdout)

@pytest.mark.parametrize('k', ways)
def test_nothing_is_disturbed(k, monkeypatch):
    m = net()
    learn,seen = learner(m, ways[k](m)),[]
    from fastai_accum import cutting
    from fastai_accum.memory import checkpointing
    guard = the_guard.guard
    def watched(cb, learn, xb):
        seen.append(state(learn)); guard(cb, learn, xb); seen.append(state(learn))
    for o in cutting,checkpointing: monkeypatch.setattr(o, 'guard', watched)
    with accumulation(2): learn.fit(1)
    assert len(seen)>=2 and seen[0]==seen[1]

@pytest.fixture
def interrupts():
    "Ctrl-C raises KeyboardInterrupt, also where the tests run in the background, which ignores it"
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, was)

@pytest.mark.parametrize('k', ways)
def test_ctrl_c(k, monkeypatch, interrupts):
    m = net()
    learn,run,times = learner(m, ways[k](m)),Trial.run,[1]
    def interrupted(*args, **kwargs):
        if times: times.pop(); signal.raise_signal(signal.SIGINT)
        return run(*args, **kwargs)
    monkeypatch.setattr(Trial, 'run', interrupted)
    class Before(Callback):
        order = -1000
        def before_batch(self): self.was = state(learn)
    learn.add_cb(Before())
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert state(learn)[:-3]==learn.before.was[:-3]   # without the attributes that are lent in a batch
    monkeypatch.undo()
    learn.fit(1)

def test_it_is_proved_again_when_something_changes(trials):
    m = net()
    learn = learner(m, MicroBatch(3, coupled=True))
    for change,n in [(noop,1), (lambda: m[0][0].requires_grad_(False), 1), (lambda: m[0][0].requires_grad_(True), 1),
                     (lambda: setattr(m[0][3], 'p', .3), 2), (lambda: setattr(m[0][3], 'p', 0.), 3),
                     (lambda: m.append(nn.Linear(3, 3)), 4), (lambda: learn.micro_batch(4, coupled=True), 4),
                     (lambda: learn.micro_batch(4, exact=True), 5)]:
        change()
        learn.create_opt()
        learn.fit(1)
        assert len(trials)==n

def test_fine_tune_is_proved_once(trials):
    "With all parameters of the optimizer, also those that are frozen at first"
    m = net()
    learn = Learner(make_dls(20, 8, x=images, y=classes(20)), m, nn.CrossEntropyLoss(), SGD,
                    cbs=MicroBatch(3, exact=True), splitter=lambda m: [params(m[0]), params(m[1:])])
    with learn.no_bar(),learn.no_logging(): learn.fine_tune(1, freeze_epochs=1)
    assert len(trials)==1
    learn.freeze()
    with learn.no_bar(),learn.no_logging(): learn.fit(1)
    assert len(trials)==1

class Slow(nn.Module):
    def forward(self, x): time.sleep(.3); return x

def test_a_line_says_how_far_it_is_and_the_epoch_does_not_count_it(capsys):
    m = net(Slow())
    dls = make_dls(8, 8, x=images[:8], y=classes(8))
    learn = Learner(dls, m, nn.CrossEntropyLoss(), SGD, cbs=MicroBatch(4, coupled=True))
    learn.add_cb(ProgressCallback())
    learn.fit(1)
    out = capsys.readouterr().out
    left = list(map(int, re.findall(r'is tried on your model, about (\d+) s more', out)))
    assert len(left)==5 and left==sorted(left, reverse=True), out
    took = float(re.search(r'samples, ([\d.]+) s', out)[1])
    assert took>3 and learn.recorder.start_epoch+took>time.time()-2   # the epoch runs the model five times

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

def test_ctrl_c_ends_it_at_once(interrupts):
    "Also while a module runs, and in the backward pass"
    class Presses(nn.Module):
        def forward(self, x):
            if threading.current_thread() is not threading.main_thread() and not pressed:
                pressed.append(time.time())
                threading.Timer(.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
                while time.time()<pressed[0]+20: x = x+0
            return x
    pressed = []
    learn = learner(net(Presses()), MicroBatch(3, coupled=True))
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert time.time()-pressed[0]<2
    learn.fit(1)

def test_proofs_are_not_kept_or_copied():
    m = net()
    learn = learner(m, MicroBatch(3, coupled=True), GradientCheckpointing([m[0]]))
    learn.fit(1)
    assert not any('to_prove' in cb.__getstate__() for cb in learn.cbs)
    pickle.dumps(learn.model); deepcopy(learn)
    ref = weakref.ref(m)
    del m,learn
    gc.collect()
    assert ref() is None

def test_what_cannot_be_tried_is_said_once():
    class Breaks(nn.Module):
        def forward(self, x):
            if planning.get(): raise IndexError('not here')
            return x
    learn = learner(net(Breaks()), MicroBatch(3, coupled=True))
    with pytest.warns(UserWarning, match='was not tried on your model.*not here.*not known'): learn.fit(1)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit(1)

def test_exact_refuses_what_cannot_be_tried():
    "And names the line that trains without a proof"
    class Breaks(nn.Module):
        def forward(self, x):
            if planning.get(): raise IndexError('not here')
            return x
    learn = learner(net(Breaks()), MicroBatch(3, exact=True))
    with pytest.raises(ValueError, match=r'not here.*learn.micro_batch\(3, exact=True, prove=False\)'): learn.fit(1)

def test_a_batch_that_is_not_cut_needs_no_proof(trials):
    learner(net(), MicroBatch(8, exact=True)).fit(1)
    assert not trials

def test_it_is_tried_in_its_own_precision_if_float64_fails(capsys):
    class Single(nn.Module):
        def forward(self, x):
            if x.dtype==torch.float64: raise RuntimeError('expected float32')
            return x
    learner(net(Single()), MicroBatch(3, exact=True), n=20).fit(1) if images.dtype==torch.float32 else None
    assert 'is proved on your model' in capsys.readouterr().out

def test_dropped_out_samples_do_not_hide_a_mistake():
    "One mask in fifty hides a row: the trial makes that frequent"
    class Rare(nn.Module):
        def forward(self, x):
            keep = (torch.rand(len(x), device=x.device)>.02).to(x)
            return x*keep[:,None,None,None] + (1-keep).sum()
    learn = learner(net(Rare()), MicroBatch(3, exact=True))
    with pytest.raises(ValueError, match='exact=True'): learn.fit(1)

@pytest.mark.parametrize('way', ways)
def test_nothing_stays_in_memory(way):
    "A model may lead to its learner, as a hook does; neither it nor the copies of the proof stay"
    def sevens(): return [o for o in gc.get_objects() if type(o) is nn.Parameter and o.shape==(7,8)]
    m = net(nn.Sequential(nn.Flatten(), nn.Linear(196, 8), nn.Linear(8, 7), nn.Linear(7, 196),
                          nn.Unflatten(1, (4,7,7))))
    learn = learner(m, ways[way](m), n=8)
    m.lead = lambda: learn
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

@pytest.mark.parametrize('odd', [lambda: Ghost(4), FromFour, lambda: Chunks(4), LateDropout],
                         ids=['ghost','branch','chunks','dropout'])
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
    assert 'is proved on your model' in capsys.readouterr().out

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

@pytest.mark.parametrize('reentrant', [True,False])
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

@pytest.mark.parametrize('cb', [lambda: MicroBatch(3, exact=True), lambda: MicroBatch(3, coupled=True)])
def test_a_backward_pass_of_a_callback(cb):
    "Beside slices of a model without norms"
    same(cb, bs=12, large=12, n=48, also=OwnBackward)

def test_python_3_14(monkeypatch, capsys):
    "`copy` has lost a private function there, and the proof does not need it"
    monkeypatch.delattr(sys.modules['copy'], '_deepcopy_atomic')
    learner(net(), MicroBatch(3, exact=True)).fit(1)
    assert 'is proved on your model' in capsys.readouterr().out

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

@pytest.mark.parametrize('bs', [8,1])
@pytest.mark.parametrize('k', at_16)
def test_numbers_and_weights_that_depend_on_the_size(k, bs):
    "Also where slices have one sample"
    refused_at_16(make_dls(64, 32), FromSixteen(k), MicroBatch(bs, exact=True))

@pytest.mark.parametrize('k', ['norm','weights'])
def test_the_size_of_a_batch_that_is_split_in_another_way(k):
    def split(b, bs): return [(b[0][:,i:i+bs],b[1][i:i+bs]) for i in range(0, len(b[1]), bs)]
    dl = DataLoader([(features(32).T,classes(32))]*2, bs=None)
    refused_at_16(DataLoaders(dl, dl), FromSixteen(k, dim=1), MicroBatch(8, exact=True, split=split))

def test_numbers_that_count_samples():
    "Such as a mean that is written by hand"
    class Means(nn.Module):
        def __init__(self): super().__init__(); self.m = small_model()
        def forward(self, x):
            h = self.m(x)
            self.mean = h.detach().sum()/len(h) + h.detach().sum()*(1/len(h)) + 0*torch.arange(1, len(h)+1).sum()
            return h
    same(lambda: MicroBatch(8, exact=True), bs=32, model=Means, splitter=trainable_params)

@pytest.mark.parametrize('value', [0.,1.])
def test_constant_images(value):
    "Behind a batch norm their gradient is nothing but rounding, which says nothing of slices"
    def conv(n): return nn.Conv2d(n, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(*conv(3), *conv(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8,3))
        dl = DataLoader([(torch.full((8,3,12,12), value),classes(8))], bs=None)
        learn = Learner(DataLoaders(dl, dl), model, nn.CrossEntropyLoss(), cbs=MicroBatch(4, exact=True))
        with learn.no_bar(),learn.no_logging(): learn.fit(1)
