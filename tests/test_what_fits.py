"`learn.what_fits()`: what it measures, what it suggests, and that it changes nothing; on small models"
import gc,pytest
from nets import *
from fastai.tabular.all import TabularDataLoaders,Categorify,Normalize,tabular_learner
from fastai.text.all import AWD_LSTM,TextDataLoaders,awd_lstm_clas_config,text_classifier_learner
import fastai_accum.all
from fastai_accum.proof.dry import planning
from fastai_accum.know import what_fits as ways

@pytest.fixture(autouse=True, scope='module')
def quick():
    """PyTorch's profiler imports its compiler, whose many objects make each collection of garbage slow. All ways are
    tried, however busy the machine is"""
    ways.peak_bytes(lambda: None)
    gc.collect(); gc.freeze()
    n_try,limit = ways.n_try,ways.limit
    ways.n_try,ways.limit = 1,math.inf
    yield
    ways.n_try,ways.limit = n_try,limit
    gc.unfreeze()

class Block(nn.Module):
    "A block with two layers, which checkpointing finds"
    def __init__(self, n, norm):
        super().__init__()
        self.a,self.b,self.norm = nn.Conv2d(n, n, 3, padding=1),nn.Conv2d(n, n, 3, padding=1),norm(n)
    def forward(self, x): return x + self.b(F.gelu(self.norm(self.a(x))))

def net(n=16, norm=nn.Identity):
    blocks = [Block(n, norm) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(1, n, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 3))

def flat(): return nn.Sequential(nn.Flatten(), nn.Linear(576, 500), nn.ReLU(), nn.Linear(500, 3))

def learner(model=None, bs=16, px=24, dl_bs=None, **kwargs):
    torch.manual_seed(0)
    data = [(torch.randn(1, px, px), i%3) for i in range(3*bs)]
    dls = DataLoaders.from_dsets(data, data, bs=dl_bs or bs, device='cpu')
    return quiet(Learner(dls, model or net(), loss_func=nn.CrossEntropyLoss(), **kwargs))

def fits(learn, budget='1KB'):
    "So nothing fits, and all is tried; the learner is as before"
    before = left(learn)
    res = learn.what_fits(budget)
    assert_left(before, learn)
    return res

def plain_slices(found): return first(o for o in found.ways if 'micro_batch' in o.line)

def held(learn): return sum(o.nbytes for o in learn.model.state_dict().values())
def peak(learn): return ways.peak_bytes(lambda: learn.fit(1, cbs=NoValid()))+held(learn)

def about(a, b, by=.05): assert abs(a-b)<by*b, (a, b)

def test_each_line_takes_what_the_table_says():
    "Measured with nothing frozen"
    frozen = learner(net(n=32), splitter=lambda m: [params(m[:3]), params(m[3:])])
    frozen.freeze()
    for o in fits(frozen).ways:
        learn = learner(net(n=32))
        if o.line: exec(o.line, dict(learn=learn))
        about(peak(learn), o.peak)

@each(cbs=[noop, lambda: AccumulateStep(2)])
def test_suggests_the_fastest_that_is_the_same_training(cbs):
    whole,learn = fits(learner()).ways[0].peak,learner(cbs=cbs())
    found = fits(learn, int(.6*whole))
    about(found.ways[0].peak, whole)
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
    assert fits(learn, max(cut.peak, again.peak)+1000).best.line=='learn.gradient_checkpointing()'
    found = fits(learn, min(cut.peak, again.peak)-1000)
    assert found.best and not found.best.is_same   # only slices are small enough, and the row says what they change

def info_nce(pred, y):
    a,b = F.normalize(pred, dim=1).chunk(2)
    return F.cross_entropy(a@b.T/.1, torch.arange(len(a)))
def dropout(): return net(norm=lambda n: nn.Dropout())

@each(case=[(dropout,None,'other dropout masks'), (net,info_nce,'as the check says')])
def test_what_is_the_same_with_exact_only(case):
    model,loss,changes = case
    learn = learner(model())
    learn.loss_func = loss or learn.loss_func
    found = fits(learn, int(.7*fits(learn).ways[0].peak))
    assert plain_slices(found).changes==changes and found.best.is_same
    assert any('exact=True' in o.line and o.fits and o.is_same for o in found.ways)

def test_out_of_memory_is_a_row():
    found = fits(learner(limited(net(), 5)), '1GB')
    assert [o.fits for o in found.ways]==[False,False,False,True,True]
    assert found.best.line=='learn.micro_batch(4, exact=True)' and found.best.is_same
    assert found.table['peak memory'][:3].tolist()==['out of memory']*3

def test_says_why_there_is_no_suggestion(monkeypatch):
    found = fits(learner(), '10kB')
    assert found.best is None and found.title.startswith('Nothing that was tried fits in 10 KB: `learn.micro_batch(1)')
    for o in repr(found),found._repr_markdown_(): assert found.title in o and 'gradient_checkpointing' in o
    # with Adam, gradients and averages are three times the weights, so smaller slices save as little
    found = fits(learner(flat()), '1MB')
    assert found.best is None and found.title.endswith('an optimizer that keeps less, such as `SGD`')
    assert sum('micro_batch' in o.line for o in found.ways)<=2
    # after `limit` seconds no other way is begun; the learner as it is is always measured
    monkeypatch.setattr(ways, 'limit', 0)
    found = fits(learner(), '10kB')
    assert [o.line for o in found.ways]==[''] and found.ways[0].time>0
    assert '`learn.micro_batch(8)`' in found.note and '(no other way is begun after 0 s)' in found.note
    assert found.title.startswith('Nothing that was tried fits')

@each(bs=[2,5])
def test_what_is_not_known_is_not_the_same(bs):
    "A batch of 5 or 7 leaves a slice of one sample, on which batch norm raises an error"
    found = fits(learner(net(norm=nn.BatchNorm2d), bs=bs)).ways
    assert found[0].is_same and all(o.changes.startswith('batch norm sees') for o in found if 'micro_batch' in o.line)
    for learn in learner(bs=bs),learner(nn.Sequential(net(), Made(lambda m, x: x-x.mean(0))), bs=bs):
        cut = plain_slices(fits(learn))
        assert cut.changes=='as the check says' and not cut.is_same

def test_a_way_that_was_not_proved_never_becomes_the_same():
    "A trial that failed is not made again: what was not known stays unknown, in the second call too"
    def locks(m, xs):
        if planning.get(): raise IndexError('not in a trial')
    blocks = [Block(8, nn.Identity) for _ in range(4)]
    for o in blocks: o.register_forward_pre_hook(locks)
    learn = learner(nn.Sequential(nn.Conv2d(1, 8, 3), *blocks, nn.Flatten(), nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="the layer of '6.weight' has no size before the first batch"):
        learn.what_fits('1KB')
    learn.model(torch.randn(1,1,24,24))
    for _ in range(2):
        way, = [o for o in fits(learn).ways if o.line=='learn.gradient_checkpointing()']
        assert way.changes=='not proved'

@each(second=[.95,.5])
def test_noise_does_not_decide(second, monkeypatch):
    "A way that is a little faster than the learner as it is counts as equally fast"
    times = itertools.chain([1.,second], itertools.repeat(2.))   # as if each step took so many seconds
    def end(self): self.ends = list(np.cumsum([0,9,next(times)]))
    monkeypatch.setattr(ways.Meter, 'after_fit', end, raising=False)
    assert fits(learner()).table.time[:3].tolist()==['1.0', '1.0' if second>.9 else '0.5', '2.0']

def test_errors_of_what_fits(monkeypatch):
    learn = learner()
    def broken(x): raise IndexError
    learn.model.forward = broken   # so nothing is tried before it says so
    for bad in 'much','8 apples','8',8,0,-5,True,math.inf,[8]:
        with pytest.raises(ValueError, match=f"budget must be .*, got {re.escape(repr(bad))}"): learn.what_fits(bad)
    empty = Learner(DataLoaders(), net(), loss_func=nn.MSELoss())
    for l,budget,says in [
        (learn, None, r"budget is needed; .* `learn.what_fits\('8GB'\)`"), (empty, None, 'no training loader'),
        (learner(dl_bs=64), '1GB', 'yields no batch'),
        (learner(cbs=MicroBatch(12)), '1KB', r'has MicroBatch\(bs=12\) already.*`learn.remove_cb\(MicroBatch\)`')]:
        with pytest.raises(ValueError, match=says): l.what_fits(budget)
    with pytest.raises(IndexError): learn.what_fits('1KB')
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(RuntimeError, match='call it in one process'): learn.what_fits()
    mps = SimpleNamespace(dls=SimpleNamespace(device='mps'))
    with pytest.raises(RuntimeError, match='counts no memory on mps'): ways.Trials(mps)

# ---- texts, tables, mixed precision, and learners in odd states

def test_texts_are_measured_with_the_longest():
    random.seed(0)
    df = pd.DataFrame(dict(text=[' '.join(random.choices('abcdefgh', k=n)) for n in [*range(5,64), 90]],
                           label=random.choices('xy', k=60)))
    dls = TextDataLoaders.from_df(df, text_col='text', label_col='label', valid_pct=.1, seed=1, bs=8, device='cpu')
    config = dict(awd_lstm_clas_config, emb_sz=8, n_hid=12, n_layers=2)
    learn = quiet(text_classifier_learner(dls, AWD_LSTM, pretrained=False, config=config))
    found = fits(learn)
    assert ways.Trials(learn, 1024).batch[0].shape[1]==max(len(o[0]) for o in dls.train_ds)
    assert found.ways[0].is_same and 'other dropout masks' in plain_slices(found).changes
    # though callbacks of RNNs keep activations
    about(ways.peak_bytes(lambda: learn.fit(2, cbs=NoValid()))+held(learn), found.ways[0].peak)

def test_what_fits_for_tables():
    n = 400
    df = pd.DataFrame(dict(a=np.random.rand(n), b=np.random.choice(list('xyz'), n), y=np.random.choice([0,1], n)))
    dls = TabularDataLoaders.from_df(df, procs=[Categorify,Normalize], cat_names=['b'], cont_names=['a'], y_names='y',
                                     y_block=CategoryBlock(), bs=64, device='cpu')
    found = fits(quiet(tabular_learner(dls, layers=[20,10])))
    assert plain_slices(found).changes=='batch norm sees 32 of 64'   # two inputs

def test_what_fits_in_mixed_precision():
    def deep(): return nn.Sequential(nn.Flatten(), *[o for _ in range(8) for o in (nn.Linear(64, 64), nn.GELU())])
    def peak_of(cb): return fits(learner(deep(), bs=512, px=8, cbs=cb)).ways[0].peak
    plain,mixed,scaled = map(peak_of, (None,OnCpu(torch.bfloat16),OnCpu()))
    assert mixed<.8*plain
    about(scaled, plain)
    def peak(scale):
        learn = learner(flat(), cbs=OnCpu(init_scale=scale))
        learn.loss_func = lambda pred, y: 64*F.cross_entropy(pred, y)
        return fits(learn).ways[0].peak
    about(peak(2.**127), peak(2.**10))   # where the scaler skips the first steps, with the state of the optimizer
    assert not torch.is_autocast_cpu_enabled()

def test_what_was_there_before_does_not_count():
    learn = learner(opt_func=Adam)
    new = fits(learn).ways[0].peak
    learn.fit(1)   # from now on, it has gradients and the state of the optimizer
    ps = learn.model.parameters()
    held = sum(2*p.nbytes+(0 if p.grad is None else p.grad.nbytes) for p in ps)
    assert abs(new-fits(learn).ways[0].peak-held)<.05*new

def test_what_is_refused_is_left_out():
    model = net()
    model.reset = noop
    found = fits(learner(model))
    assert found.ways[0].time and 'has a reset()' in found.note
    for o in found,fits(learner(bs=1)): assert not any('micro_batch' in w.line for w in o.ways)

def test_loaders_of_pytorch():
    data = [(torch.randn(1, 24, 24), i%3) for i in range(40)]
    dl = torch.utils.data.DataLoader(data, batch_size=16, num_workers=2)
    found = fits(quiet(Learner(DataLoaders(dl, dl), net(), loss_func=nn.CrossEntropyLoss())), '1GB')
    assert found.best.line=='' and 'on 16 samples' in found.note

@simulated
def test_what_fits_on_a_device(fakegpu):
    "Activations move to the host"
    learn = learner(net(norm=nn.BatchNorm2d))
    learn.dls.to('fakegpu:0')
    own = torch.empty(2**20, pin_memory=True)   # such as that of a loader, which no line takes
    found = {o.line:o for o in fits(learn).ways}
    again,moved = "gradient_checkpointing(room='1KB')","offload_activations(room='1KB')"
    whole,again,moved,both = [found[o] for o in ('',f'learn.{again}',f'learn.{moved}',f'learn.{again}.{moved}')]
    assert moved.peak<.6*whole.peak and moved.is_same and moved.ram and whole.fits is False
    assert both.peak<again.peak and both.is_same and not again.ram and own.is_pinned()
    budget = (moved.peak+whole.peak)//2
    found = fits(learn, budget)
    moved, = [o for o in found.ways if 'offload' in o.line]
    assert moved.fits and moved.line==f'learn.offload_activations(room={budget})' and 'of RAM' in str(found)
    assert next(learn.model.parameters()).device.type=='cpu'

@simulated
def test_the_budget_of_a_device(fakegpu, monkeypatch):
    """With a stand-in for the allocator: 1000 bytes are free, 300 are kept for new tensors, `f` takes 250 at most; or
    half of 2000 bytes are for this process, which has 500 of them"""
    now = dict(memory_allocated=500, memory_reserved=800, max_memory_allocated=500)
    for k in now: monkeypatch.setattr(fakegpu, k, lambda d, k=k: now[k])
    monkeypatch.setattr(fakegpu, 'mem_get_info', lambda d: (1000, 9999))
    monkeypatch.setattr(fakegpu, 'reset_peak_memory_stats', noop)
    device = torch.device('fakegpu:0')
    assert ways.free_here(device)==11*1300//12
    with monkeypatch.context() as m:
        m.setattr(fakegpu, 'mem_get_info', lambda d: (1000, 2000))
        m.setattr(fakegpu, 'get_per_process_memory_fraction', lambda d: .5, raising=False)
        assert ways.free_here(device)==11*500//12
    assert ways.peak_bytes(lambda: now.update(memory_allocated=600, max_memory_allocated=750), device)==250

@pytest.mark.skipif(not torch.cuda.is_available(), reason='tries what fits on a GPU, and this machine has none')
def test_what_fits_on_a_gpu():
    learn = learner(bs=64, px=64)
    learn.dls.device = torch.device('cuda')
    found = fits(learn, None)
    assert found.budget>0 and found.best.line==''
    def taken(): torch._C._cuda_clearCublasWorkspaces(); return torch.cuda.memory_allocated()   # which PyTorch keeps
    whole,before = found.ways[0].peak,taken()
    found = fits(learn, int(.5*whole))
    assert found.best and found.best.is_same
    assert abs(taken()-before)<1e6
    torch.cuda.set_per_process_memory_fraction(.9*whole/torch.cuda.get_device_properties(0).total_memory)
    try: assert fits(learn, '1GB').ways[0].peak is None
    finally: torch.cuda.set_per_process_memory_fraction(1.)
