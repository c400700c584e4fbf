import json,sys
from contextlib import suppress
from pathlib import Path
import pytest,torch
sys.path.insert(0, str(Path(__file__).resolve().parent/'simulated'))   # `fakegpu` is there
# the tensors are tiny, and threads that wait for each other make a busy machine ten times slower
torch.set_num_threads(1)
import harness

@pytest.fixture(autouse=True)
def seeds():
    "A test does the same in each run, whatever ran before it"
    harness.seed_all()

def pytest_collection_finish(session):
    """Load the simulated accelerator if a test asks for it, and only then: it belongs to the whole process. PyTorch
    counts devices at the first backward pass of all, so it is too late within a test"""
    if torch.cuda.is_available() or not any({'device','fakegpu'} & set(o.fixturenames) for o in session.items): return
    with suppress(ModuleNotFoundError): import fakegpu

class Cuda:
    "`torch.cuda` in the place of the simulated accelerator"
    def races(self): return []
    def pending(self): return 0
    def pinned_stats(self): return dict(count=0, now=0)   # CUDA counts what its cache keeps, too
    def __getattr__(self, k):
        if not hasattr(torch.cuda, k): pytest.skip(f'only the simulated accelerator has `{k}`')
        return getattr(torch.cuda, k)

@pytest.fixture
def fakegpu(monkeypatch):
    """The simulated accelerator, as the module `torch.fakegpu`: a test ends without races and limits, and is put back.
    On a machine with a GPU, it is that one"""
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cudnn, 'deterministic', True)
        torch.cuda.set_device(0)
        torch.cuda.manual_seed_all(0)
        yield Cuda()
        torch.cuda.empty_cache()
        return
    try: import fakegpu as simulated
    except ModuleNotFoundError as e: pytest.skip(str(e))
    devices = range(simulated.device_count())
    def clean():
        found = simulated.races(),[simulated.stats(d)['limit'] for d in devices]
        for d in devices:
            simulated.synchronize(d)   # or late copies of this test are counted in the next one
            simulated.set_limit(None, d)
            simulated.reset_peak_memory_stats(d)
            simulated.set_stream(simulated.default_stream(d))
        simulated.set_device(0)
        simulated.manual_seed_all(0)
        return found
    clean()
    from fastai.callback import fp16   # which names 'cuda'
    monkeypatch.setattr(fp16, 'autocast', lambda _, **kwargs: torch.autocast('fakegpu', **kwargs))
    monkeypatch.setattr(fp16, 'GradScaler', lambda _, **kwargs: torch.amp.GradScaler('fakegpu', **kwargs))
    yield simulated
    races,limits = clean()
    assert not races, races
    assert not any(limits), f'a limit was left: {limits}'

@pytest.fixture(params=['cpu',harness.GPU])
def device(request, monkeypatch):
    "The CPU, and the simulated accelerator: there is the data of `make_dls`, and so the model"
    on_cpu = request.param=='cpu'
    gpu = None if on_cpu else request.getfixturevalue('fakegpu')
    def total():
        if on_cpu: return 0
        if request.param.startswith('cuda'): return torch.cuda.memory_stats(0).get('allocation.all.allocated', 0)
        return sum(gpu.stats(d)['total'] for d in range(gpu.device_count()))
    monkeypatch.setattr(harness.here, 'device', torch.device(request.param))
    before = total()
    yield harness.here.device
    assert on_cpu or total()>before, 'nothing was on the device'

results = {}   # of the rows of the page "What is exact and what is not", by group and name

def pytest_addoption(parser):
    parser.addoption('--works-with', metavar='FILE', help='write what the rows of the page measured')

@pytest.fixture
def works(request):
    "Takes what a test measures for its row"
    from matrix import Works
    return Works(request.node.get_closest_marker('row').kwargs, results, bool(request.config.getoption('--works-with')))

def pytest_sessionfinish(session, exitstatus):
    out = session.config.getoption('--works-with')
    if not out or exitstatus: return
    from matrix import all_rows,key
    missing = {key(r) for r in all_rows()}-set(results)
    if missing:
        session.exitstatus = 1
        return print(f'\n{out} is not written, since these rows were not measured (skipped, not selected, or in '
                     f'another process): {sorted(missing)}')
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent/'benchmarks'))
    from common import machine
    text = json.dumps(dict(machine=machine(), rows=list(results.values())), indent=1)
    Path(out).write_text(text+'\n', encoding='utf-8')
