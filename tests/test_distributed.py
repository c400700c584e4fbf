"""Several processes against one that trains on all their samples, on the CPU over loopback (`several.py` has the cases).

All cases run in one set of processes for each number of them, since starting them takes longer than training; no wait is without a limit."""
import os,socket,subprocess,sys
import pytest
pytest.importorskip('accelerate', reason='fastai trains in several processes through accelerate')
from several import *

LIMIT = 240   # seconds for all cases together, on a busy machine

def free_port():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]

def run(world, folder, names, limit=LIMIT):
    "Start the processes, and wait for all of them: exit codes and what they print"
    env = {**os.environ, 'PYTHONPATH':os.pathsep.join([str(Path(__file__).resolve().parent.parent), os.environ.get('PYTHONPATH','')]), 'OMP_NUM_THREADS':'1'}
    logs,port = [folder/f'log{r}' for r in range(world)],free_port()
    args = lambda r: [sys.executable, '-W', 'ignore', Path(__file__).parent/'several.py', str(r), str(world), str(port), folder, *names]
    ps = [subprocess.Popen(args(r), env=env, stdout=logs[r].open('w'), stderr=subprocess.STDOUT) for r in range(world)]
    end = time.time()+limit
    try: codes = [p.wait(max(1, end-time.time())) for p in ps]
    finally:
        for p in ps: p.kill()
    return codes,[l.read_text() for l in logs]

some = 'even tail uneven one_is_empty longer shorter much_longer buffers_long dropped_last lr_find static unused ctx_odd ctx_find'
worlds = {2: [k for k in cases if k not in ('breaks','varying')], 3: some.split()}
AMPLIFIED = dict(lr_find_stops=1e-8)   # where the loss diverges, it amplifies rounding

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "What the processes have trained, by their number; started when first asked for"
    done = {}
    def get(world):
        if world not in done:
            folder = tmp_path_factory.mktemp(f'world{world}')
            codes,logs = run(world, folder, worlds[world])
            assert not any(codes), '\n'.join(o[-3000:] for o in logs)
            done[world] = folder
        return done[world]
    return get

def load(folder, name, world): return [torch.load(folder/f'{name}.{r}', weights_only=False) for r in range(world)]

@pytest.mark.parametrize('world,name', [(w,k) for w,ks in worlds.items() for k in ks])
def test_same_as_one_process(world, name, results, monkeypatch, tmp_path):
    monkeypatch.setenv('SEVERAL_PATH', str(tmp_path))
    alone = result(cases[name].alone(world))
    assert alone['n_steps']>0
    for r,several in enumerate(load(results(world), name, world)):
        for k in alone:
            if k!='seen': assert rel(several[k], alone[k])[0]<=AMPLIFIED.get(name, TOL), (r, *rel(several[k], alone[k], k))

def test_messages_of_a_window(results):
    "Two windows of four: one reduction of the gradients each, of the bytes of one batch, and one small message"
    n_bytes = sum(p.numel()*8 for p in small_model().parameters())
    for several in load(results(2), 'messages', 2):
        sent = [o for o,_ in several['seen']]
        assert sent==[[24], [], [], [n_bytes,24], [], [], [], [n_bytes,24]]   # first the number of windows, once an epoch

def test_gradients_between_boundaries(results):
    "Those of the processes differ until the boundary, and are equal there"
    a,b = ([g for _,g in o['seen']] for o in load(results(2), 'messages', 2))
    same = [all(torch.equal(x, y) for x,y in zip(*gs)) for gs in zip(a,b)]
    assert same==[False,False,False,True]*2

def test_an_error_in_one_process(tmp_path):
    "The other one does not wait for it for ever, and says what has happened"
    t = time.time()
    codes,logs = run(2, tmp_path, ['breaks'], limit=100)
    assert all(codes) and 'process 1 has had enough' in logs[1]
    assert 'AccumulateStep: another process has ended' in logs[0], logs[0][-3000:]

def test_varying_sizes(tmp_path):
    "No process knows how large the others' micro-batches are"
    codes,logs = run(2, tmp_path, ['varying'], limit=100)
    assert all(codes) and all('AccumulateStep: n_samples over several processes needs a loader with a batch size' in o for o in logs)

script = '''
import torch
from fastai.basics import *
from fastai.distributed import *
from fastai_accum.all import *

def on_cpu(self, t, rank): t = LongTensor(t); torch.distributed.broadcast(t, rank); return t.tolist()
DistributedDL._broadcast = on_cpu   # fastai's moves it to a GPU

set_seed(0)
x,y = torch.randn(90, 6),torch.randint(3, (90,))
dl = DataLoader(list(zip(x,y)), bs=8, shuffle=True)
learn = Learner(DataLoaders(dl, dl), nn.Linear(6,3), loss_func=nn.CrossEntropyLoss(), cbs=AccumulateStep(n_step=3))
with learn.distrib_ctx(cpu=True, sync_bn=False): learn.fit(2)
c = learn.accumulate_step.counts
w = sum(p.sum().item() for p in learn.model.parameters())
print(f'process {rank_distrib()} of {num_distrib()}: {c.n_steps} steps, {c.n_stepped} samples, weights {w:.6f}')
'''
def test_launched(tmp_path):
    """A script that `torchrun` starts: both processes make the same steps, and have the same weights.
    (`accelerate launch` starts several processes on GPUs, or through MPI, but not on a CPU alone.)"""
    (tmp_path/'train.py').write_text(script)
    env = {**os.environ, 'PYTHONPATH':str(Path(__file__).resolve().parent.parent), 'PYTHONWARNINGS':'ignore', 'OMP_NUM_THREADS':'1'}
    args = [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node', '2', '--master_port', str(free_port()), 'train.py']
    res = subprocess.run(args, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
    lines = sorted(re.findall(r'process (\d) of 2: (.*)', res.stdout))
    assert [r for r,_ in lines]==['0','1'] and lines[0][1]==lines[1][1], res.stdout+res.stderr[-3000:]
    assert lines[0][1].startswith('4 steps, 90 samples')   # 45 samples an epoch: a window of 24 and a tail of 21
