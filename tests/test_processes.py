"""Several processes against one that trains on all their samples, on the CPU over loopback; several.py has the cases.

All cases run in one set of processes for each number of them, since starting them takes longer than training; no wait
is without a limit."""
import os,socket,subprocess,sys
import pytest
pytest.importorskip('accelerate',
                    reason='fastai trains in several processes through accelerate, which is not installed')
from several import *

LIMIT = 3600   # seconds, a guard against processes that wait for ever: no test is to come near it

def free_port():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]

root = Path(__file__).resolve().parents[1]
path = filter(None, [os.environ.get('PYTHONPATH'), str(root)])
env = {**os.environ, 'PYTHONPATH':os.pathsep.join(path), 'OMP_NUM_THREADS':'1', 'PYTHONWARNINGS':'ignore'}

def run(world, folder, names):
    "Start the processes, and wait for all of them: exit codes and what they print"
    logs = [folder/f'log{r}' for r in range(world)]
    ps = [subprocess.Popen([sys.executable, root/'tests'/'several.py', str(r), str(world), folder, *names],
                           env={**os.environ, **env}, stdout=l.open('w'), stderr=subprocess.STDOUT)
          for r,l in enumerate(logs)]
    end = time.time()+LIMIT
    try: codes = [p.wait(max(1, end-time.time())) for p in ps]
    finally:
        for p in ps: p.kill()
    return codes,[l.read_text(encoding='utf-8') for l in logs]

def started(worlds, tmp_path_factory):
    "What the processes have trained, by their number; started when first asked for"
    done = {}
    def get(world, *names):
        if world not in done:
            folder = tmp_path_factory.mktemp(f'world{world}')
            done[world] = folder,*run(world, folder, worlds[world])
        folder,codes,logs = done[world]
        assert not any(codes), '\n'.join(o[-3000:] for o in logs)
        return {k:[torch.load(folder/f'{k}.{r}', 'cpu', weights_only=False) for r in range(world)]
                for k in names or worlds[world]}
    return get

# each in processes of its own: one fails, and the other finds that it has ended. fastai adds up these metrics over the
# processes at each micro-batch
alone = dict(breaks='process 1 has had enough', killed='another process has ended', empty='no training',
             metrics_uneven='collective mismatch|EnforceNotMet')   # as gloo says it
some = '''tail events_weighed one_is_empty dropped_last unused_drop ctx_odd sched synced_weighed breaks_model
          refuses_groups'''.split()
devices = 'tail buffers_drop cut synced synced_weighed synced_skips synced_cumulates breaks_model'.split()
worlds = {2: [k for k in cases if k not in ('refuses_groups',*alone)], 3: some}

@pytest.fixture(scope='module')
def results(tmp_path_factory): return started(worlds, tmp_path_factory)

def compare_all(results, world):
    "Compare what the processes have trained with what one process trains, and name all that differ"
    wrong = {}
    for nm,all_processes in results(world).items():
        seed_all()
        try:
            one = result(cases[nm].alone(world))
            assert one['n_steps']>0
            for several in all_processes:
                for k in one:
                    if k!='seen' and k not in cases[nm].but: close(several[k], one[k])
        except AssertionError as e: wrong[nm] = str(e)
    assert not wrong, wrong

@pytest.mark.parametrize('world', worlds)
def test_same_as_one_process(world, results): compare_all(results, world)

def test_every_event_in_processes(results):
    "Callbacks of any order see what they see in one process that trains on the large batches, the loss included"
    seen = cases['events_weighed'].alone(2).seen
    for several in results(2, 'events_weighed')['events_weighed']:
        assert [o[:-1] for o in several['seen']]==[o[:-1] for o in seen]
        close(several['seen'], seen)
        assert len(seen)>100

def test_messages(results):
    """One at the end of a window, and one with the gradients. An exact batch sends one more at each of two norms,
    forward and backward, although one process has six slices and the other has two"""
    for name,n_windows,n_norms in ('messages',2,0),('synced_messages',8,2):
        for several in results(2, name)[name]:
            assert several['seen']==[dict(all_gather=2*n_norms+1, all_reduce=1)]*n_windows

def test_on_two_devices(fakegpu, tmp_path_factory, monkeypatch):
    "Each process trains on a simulated accelerator of its own, and one process on the CPU"
    monkeypatch.setenv('SEVERAL_DEVICES', '1')
    compare_all(started({2:devices}, tmp_path_factory), 2)

@pytest.mark.parametrize('name', alone)
def test_an_end_that_one_process_sees(name, tmp_path):
    "An error in one process, or its end between two norms: the other one does not wait for ever"
    codes,logs = run(2, tmp_path, [name])
    assert all(codes), 'a process has gone on'
    assert any(re.search(alone[name], o) for o in logs), [o[-3000:] for o in logs]

script = '''
from fastai.basics import *
from fastai.distributed import *
from fastai_accum.all import *

gpu = torch.cuda.device_count()>=2
def on_cpu(self, t, rank): t = LongTensor(t); torch.distributed.broadcast(t, rank); return t.tolist()
if not gpu: DistributedDL._broadcast = on_cpu   # fastai's moves it to a GPU

x,y = torch.randn(90, 6, generator=torch.Generator().manual_seed(0)).double(),torch.arange(90)%3

def get_learner(*dls):
    set_seed(0)
    norm = nn.BatchNorm1d(8) if gpu else nn.LayerNorm(8)   # synchronised batch norm needs GPUs
    model = nn.Sequential(nn.Linear(6,8), norm, nn.ReLU(), nn.Linear(8,3)).double()
    return Learner(DataLoaders(*dls), model, loss_func=nn.CrossEntropyLoss(), default_cbs=False,
                   cbs=[TrainEvalCallback(), AccumulateStep(n_step=2)])

def train():
    learn = get_learner(*(DataLoader(list(zip(x,y)), bs=bs) for bs in (9,15)))
    with learn.distrib_ctx(cpu=not gpu, sync_bn=gpu): learn.fit(2, .01)
    device = next(learn.model.parameters()).device
    # the micro-batches of both processes
    joined = [torch.cat([torch.arange(i, i+9), torch.arange(45+i, 54+i)]) for i in range(0, 45, 9)]
    alone = get_learner(*(DataLoader([(x[i].to(device),y[i].to(device)) for i in o], bs=None)
                          for o in (joined, [torch.arange(90)])))
    alone.model.to(device)
    alone.fit(2, .01)
    a,b = (torch.cat([o.double().flatten() for o in l.model.state_dict().values()]) for l in (learn,alone))
    err,c = (a-b).norm()/b.norm(),learn.accumulate_step.counts
    assert err<=1e-12, err
    print(f'process {rank_distrib()} of {num_distrib()}: {c.n_steps} steps, {c.n_stepped} samples', flush=True)
'''
def launched(how, folder):
    "Two processes train, however they are started: 45 samples an epoch in each, in windows of 18, 18 and 9"
    (folder/'train.py').write_text(script + '\nif __name__=="__main__": train()')
    start = f'notebook_launcher(train, num_processes=2, use_port="{free_port()}")'
    (folder/'notebook.py').write_text(f'{script}\nfrom accelerate import notebook_launcher\n{start}')
    args = dict(torchrun=['-m', 'torch.distributed.run', '--nproc_per_node', '2', '--master_port', str(free_port()),
                          'train.py'], notebook_launcher=['notebook.py'],
                accelerate=['-m', 'accelerate.commands.launch', '--multi_gpu', '--num_processes', '2',
                            '--main_process_port', str(free_port()), 'train.py'])[how]
    res = subprocess.run([sys.executable, *args], cwd=folder, env={**os.environ, **env}, capture_output=True, text=True,
                         timeout=LIMIT)
    assert not res.returncode, res.stdout+res.stderr[-3000:]
    said = sorted(re.findall(r'process \d of 2: \d+ steps, \d+ samples', res.stdout))
    assert said==[f'process {r} of 2: 6 steps, 90 samples' for r in range(2)]

@pytest.mark.parametrize('how', ['torchrun','notebook_launcher','accelerate'])
def test_launched(how, tmp_path, monkeypatch):
    "A script in `distrib_ctx` trains what one process trains; the page about several GPUs runs its own"
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    launched(how, tmp_path)

@pytest.mark.skipif(torch.cuda.device_count()<2,
                    reason='trains on two GPUs with NCCL and synchronised batch norm, and this machine has fewer')
@pytest.mark.parametrize('how', ['torchrun','accelerate'])
def test_on_gpus(how, tmp_path):
    "The same with NCCL and synchronised batch norm, whose running statistics are compared too"
    launched(how, tmp_path)
