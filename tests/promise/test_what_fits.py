"`learn.what_fits()`: what it measures, what it suggests, and that it changes nothing"
import gc,itertools,pytest
from harness import *
import fastai_accum.all
from fastai_accum.dry import planning
from fastai_accum.know import ways,what_fits
from fastai_accum.memory.checkpointing import GradientCheckpointing

@pytest.fixture(autouse=True, scope='module')
def quick():
    "PyTorch's profiler imports its compiler, whose many objects make each collection of garbage slow"
    ways.peak_bytes(lambda: None)
    gc.collect(); gc.freeze()
    ways.n_try = 1
    yield
    ways.n_try = 3
    gc.unfreeze()

class Block(nn.Module):
    "A block with two layers, which checkpointing finds"
    def __init__(self, n, norm):
        super().__init__()
        self.a,self.b,self.norm = nn.Conv2d(n, n, 3, padding=1),nn.Conv2d(n, n, 3, padding=1),norm(n)
    def forward(self, x): return x + self.b(F.gelu(self.norm(self.a(x))))

def net(n=16, norm=nn.Identity):
    blocks = [Block(n, norm) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(1, n, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 3))

class Limited(nn.Module):
    "Runs out of memory with more than `most` samples"
    def __init__(self, model, most): super().__init__(); self.model,self.most = model,most
    def forward(self, x):
        if len(x)>self.most: raise RuntimeError('CUDA out of memory')
        return self.model(x)

def learner(model=None, bs=16, px=24, dl_bs=None, path=None, **kwargs):
    torch.manual_seed(0)
    data = [(torch.randn(1, px, px), i%3) for i in range(3*bs)]
    dls = DataLoaders.from_dsets(data, data, bs=dl_bs or bs, device='cpu')
    learn = Learner(dls, model or net(), loss_func=nn.CrossEntropyLoss(), path=path, **kwargs)
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

def fits(learn, budget='1KB'): return learn.what_fits(budget)   # so nothing fits, and all is tried

class Train(Callback):
    "Train only"
    def before_validate(self): raise CancelValidException

def plain_slices(found): return first(o for o in found.ways if 'micro_batch' in o.line)

def peak(learn): return ways.peak_bytes(lambda: learn.fit(1, cbs=Train()))

def state(learn):
    opt = [] if learn.opt is None else [dict(learn.opt.state[p]) for ps in learn.opt.param_lists for p in ps]
    return ([o.clone() for o in learn.model.state_dict().values()], [p.requires_grad for p in learn.model.parameters()],
            [None if p.grad is None else p.grad.clone() for p in learn.model.parameters()], opt, torch.get_rng_state(),
            list(learn.cbs), list(getattr(learn.recorder, 'losses', [])), learn.dls,
            getattr(learn.dls.loaders[0], 'rng', random).getstate(), learn.model.training, set(vars(learn)))

def same(a, b):
    if isinstance(a, Tensor): return torch.equal(a, b)
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(map(same, a, b))
    if isinstance(a, dict): return a.keys()==b.keys() and all(same(a[k], b[k]) for k in a)
    return a is b or a==b

def test_each_line_takes_what_the_table_says():
    for o in learner(net(n=32)).what_fits('1KB').ways:
        learn = learner(net(n=32))
        if o.line: exec(o.line, dict(learn=learn))
        got = peak(learn)
        assert abs(got-o.peak)<.05*o.peak, (o.line, got, o.peak)

def test_suggests_the_fastest_that_is_the_same_training():
    learn = learner()
    whole = fits(learn).ways[0].peak
    found = fits(learn, int(.6*whole))
    assert found.best.is_same and found.best.fits and not found.ways[0].fits
    assert .9*found.best.time<=min(o.time for o in found.ways if o.fits and o.is_same)
    exec(found.best.line)
    assert peak(learn)<=.6*whole
    assert [o.fits for o in fits(learner(), 2*whole).ways]==[True]   # as it is, and nothing else was tried

def test_a_way_that_changes_the_training_comes_last():
    learn = learner(net(norm=nn.BatchNorm2d))
    ways = {o.line:o for o in fits(learn).ways}
    cut,again = ways['learn.micro_batch(8)'],ways['learn.gradient_checkpointing()']
    assert cut.changes=='batch norm sees 8 of 16' and again.is_same
    found = fits(learn, max(cut.peak, again.peak)+1000)
    assert found.best.line=='learn.gradient_checkpointing()'
    found = fits(learner(net(norm=nn.BatchNorm2d)), min(cut.peak, again.peak)-1000)
    assert found.best and not found.best.is_same   # only slices are small enough, and the row says what they change

def test_dropout_is_the_same_with_exact():
    learn = learner(nn.Sequential(nn.Conv2d(1, 32, 3), nn.GELU(), nn.Dropout(.5), nn.Conv2d(32, 16, 3),
                                  nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)))
    ways = fits(learn, int(.7*fits(learn).ways[0].peak))
    assert ways.best.is_same and any('exact' in o.line and o.fits and o.is_same for o in ways.ways)
    assert 'other dropout masks' in [o.changes for o in ways.ways]

def test_out_of_memory_is_a_row():
    learn = learner(Limited(net(), 5))
    before = state(learn)
    found = fits(learn, '1GB')
    assert [o.fits for o in found.ways]==[False,False,False,True,True]
    assert found.best.line=='learn.micro_batch(4, exact=True)' and found.best.is_same
    assert found.table['peak memory'][:3].tolist()==['out of memory']*3
    assert same(before, state(learn))

def test_says_why_there_is_no_suggestion():
    found = fits(learner(), '10kB')
    assert found.best is None and found.title.startswith('Nothing that was tried fits in 10 KB: `learn.micro_batch(1)')
    for o in repr(found),found._repr_markdown_(): assert found.title in o and 'gradient_checkpointing' in o

def test_stops_where_the_batch_is_not_the_memory():
    "With Adam, gradients and averages are three times the weights, so smaller slices save as little"
    model = nn.Sequential(nn.Flatten(), nn.Linear(576, 500), nn.ReLU(), nn.Linear(500, 3))
    found = fits(learner(model), '1MB')
    assert found.best is None and found.title.endswith('an optimizer that keeps less, such as `SGD`')
    assert sum('micro_batch' in o.line for o in found.ways)<=2

def test_needs_a_budget_on_a_cpu():
    "It says so before anything is tried"
    learn = learner()
    learn.model.forward = None
    with pytest.raises(ValueError, match=r"budget is needed; .* `learn.what_fits\('8GB'\)`"): learn.what_fits()

def test_ends_in_time(monkeypatch):
    "After `limit` seconds no other way is begun; the learner as it is is always measured"
    monkeypatch.setattr(ways, 'limit', 0)
    found = fits(learner(), '10kB')
    assert [o.line for o in found.ways]==[''] and found.ways[0].time>0
    assert '`learn.micro_batch(8)`' in found.note and '(no other way is begun after 0 s)' in found.note
    assert found.title.startswith('Nothing that was tried fits')

def test_of_equal_ways_the_simpler_one():
    def way(line, time, changes): return ways.Way(line, True, 1, time=time, changes=changes)
    found = [way('a', 1., 'other dropout masks'), way('b', 2.1, 'nothing'), way('c', 2., 'nothing')]
    assert what_fits.best_of(found).line=='b' and what_fits.best_of(found[:1]).line=='a' and not what_fits.best_of([])

@pytest.mark.parametrize('bs', [2,3,5,7])
def test_what_is_not_known_is_not_the_same(bs):
    "A batch of 5 or 7 leaves a slice of one sample, on which batch norm raises an error"
    found = fits(learner(net(norm=nn.BatchNorm2d), bs=bs)).ways
    assert found[0].is_same and all(o.changes.startswith('batch norm sees') for o in found if 'micro_batch' in o.line)
    cut = plain_slices(fits(learner(bs=bs)))
    assert cut.changes=='as the check says' and not cut.is_same

def test_a_way_that_was_not_proved_never_becomes_the_same():
    "A trial that failed is not made again: what was not known stays unknown, in the second call too"
    class Locked(Block):
        def __init__(self, n): super().__init__(n, nn.Identity)
        def forward(self, x):
            if planning.get(): raise IndexError('not in a trial')
            return super().forward(x)
    learn = learner(nn.Sequential(nn.Conv2d(1, 8, 3), *[Locked(8) for _ in range(4)], nn.Flatten(), nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="the layer of '6.weight' has no size before the first batch"): fits(learn)
    learn.model(torch.randn(1,1,24,24))
    for _ in range(2):
        way, = [o for o in fits(learn).ways if o.line=='learn.gradient_checkpointing()']
        assert way.changes=='not proved'

class Slow(ways.Meter):
    "As if each step took as many seconds as `times` says"
    times = iter(())
    def after_fit(self): self.ends = list(np.cumsum([0,9,next(Slow.times)]))

@pytest.mark.parametrize('times,shown', [([1.,.95], '1.0'), ([1.,.5], '0.5')], ids=['noise','faster'])
def test_noise_does_not_decide(monkeypatch, times, shown):
    "A way that is a little faster than the learner as it is counts as equally fast"
    monkeypatch.setattr(ways, 'Meter', Slow)
    monkeypatch.setattr(Slow, 'times', itertools.chain(times, itertools.repeat(2.)))
    assert fits(learner()).table.time[:3].tolist()==['1.0',shown,'2.0']

def test_our_callbacks_have_to_go_first():
    learn = learner(cbs=MicroBatch(12))
    says = r'has MicroBatch\(bs=12\) already.*`learn.remove_cb\(MicroBatch\)`'
    with pytest.raises(ValueError, match=says): fits(learn)

def test_works_with_windows():
    learn = learner(cbs=AccumulateStep(2))
    whole = fits(learner()).ways[0]
    found = fits(learn, int(.6*whole.peak))
    assert .95<found.ways[0].peak/whole.peak<1.05 and found.best.is_same
    exec(found.best.line)
    assert peak(learn)<=.6*whole.peak

def test_measures_a_frozen_body_unfrozen():
    def split(m): return [params(m[:3]), params(m[3:])]
    free,learn = learner(splitter=split),learner(splitter=split)
    learn.freeze()
    before = state(learn)
    a,b = fits(free).ways[0],fits(learn)
    assert abs(a.peak-b.ways[0].peak)<.01*a.peak
    assert same(before, state(learn))

class Stop(Callback):
    "Raises in the second step of slices"
    def __init__(self, error): self.error,self.n = error,0
    def before_step(self):
        self.n += hasattr(self.learn, 'micro_batches')
        if self.n==2: raise self.error

@pytest.mark.parametrize('error', [KeyboardInterrupt('stop'), ZeroDivisionError('stop')], ids=repr)
def test_leaves_nothing_behind(error, tmp_path):
    learn = learner(path=tmp_path, cbs=[CSVLogger(), SaveModelCallback()])
    learn.fit(1)
    files = {o:o.read_bytes() for o in tmp_path.rglob('*') if o.is_file()}
    before = state(learn)
    assert fits(learn, '1MB').ways
    learn.add_cb(Stop(error))
    was = state(learn)
    with pytest.raises(type(error)): fits(learn, '1MB')
    assert same(was, state(learn)) and same(before[:5], was[:5])
    assert files=={o:o.read_bytes() for o in tmp_path.rglob('*') if o.is_file()}
    assert 'forward' not in vars(learn.model) and '_with_events' not in vars(learn)

def test_errors(monkeypatch):
    learn = learner()
    for bad in 'much','8 apples','8',8,0,-5,True,math.inf,[8]:
        with pytest.raises(ValueError, match=f"budget must be .*, got {re.escape(repr(bad))}"): learn.what_fits(bad)
    with pytest.raises(ValueError, match="yields no batch"): learner(dl_bs=64).what_fits('1GB')
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(RuntimeError, match='call it in one process'): learn.what_fits()

def info_nce(pred, y):
    a,b = F.normalize(pred, dim=1).chunk(2)
    return F.cross_entropy(a@b.T/.1, torch.arange(len(a)))
def rmse(pred, y): return F.mse_loss(pred[:,0], y.float()).sqrt()

@pytest.mark.parametrize('loss', [info_nce, rmse], ids=lambda o: o.__name__)
def test_a_loss_that_compares_samples_is_not_called_the_same(loss):
    learn = learner()
    learn.loss_func = loss
    found = fits(learn, int(.7*fits(learn).ways[0].peak))
    assert plain_slices(found).changes=='as the check says' and found.best.is_same
    assert any('exact=True' in o.line and o.is_same for o in found.ways)
