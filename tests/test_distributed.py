"""Several processes against one that trains on all their samples, on the CPU over loopback (`several.py` has the cases).

All cases run in one set of processes for each number of them, since starting them takes longer than training; no wait is without a limit."""
import os,socket,subprocess,sys
import pytest
pytest.importorskip('accelerate', reason='fastai trains in several processes through accelerate, which is not installed')
from several import *

LIMIT = 240   # seconds for all cases together, on a busy machine

def free_port():
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); return s.getsockname()[1]

def run(world, folder, names, limit=LIMIT):
    "Start the processes, and wait for all of them: exit codes and what they print"
    env = {**os.environ, 'PYTHONPATH':os.pathsep.join([str(Path(__file__).resolve().parent.parent), os.environ.get('PYTHONPATH','')]), 'OMP_NUM_THREADS':'1'}
    logs = [folder/f'log{r}' for r in range(world)]
    args = lambda r: [sys.executable, '-W', 'ignore', Path(__file__).parent/'several.py', str(r), str(world), folder, *names]
    ps = [subprocess.Popen(args(r), env=env, stdout=logs[r].open('w'), stderr=subprocess.STDOUT) for r in range(world)]
    end = time.time()+limit
    try: codes = [p.wait(max(1, end-time.time())) for p in ps]
    finally:
        for p in ps: p.kill()
    return codes,[l.read_text() for l in logs]

some = 'even tail uneven one_is_empty longer shorter much_longer buffers_long dropped_last lr_find static unused ctx_odd ctx_find sized sized_long sized_short sized_tail sized_other carried'
refused = dict(
    static_drop    = 'drop cannot leave out the first micro-batch of an epoch of a model with static_graph=True',
    metrics_drop   = 'drop cannot leave out a micro-batch with train_metrics=True',
    metrics_uneven = 'the training loaders of the processes have 4 to 5 micro-batches, but train_metrics=True needs all processes',
    shards_long    = 'the training loaders of the processes have 4 to 5 micro-batches, but a model in fully_shard',
    auto_sized     = "bs='auto' cannot be used with n_samples when several processes train",
    empty          = 'the training loader of a process is empty')
worlds = {2: [k for k in cases if k not in ('breaks',*refused)], 3: some.split()}
AMPLIFIED = dict(lr_find_stops=1e-8)   # where the loss diverges, it amplifies rounding

@pytest.fixture(scope='module')
def results(tmp_path_factory):
    "What the processes have trained, by their number; started when first asked for"
    done = {}
    def get(world):
        if world not in done:
            folder = tmp_path_factory.mktemp(f'world{world}')
            done[world] = folder,*run(world, folder, worlds[world])
        folder,codes,logs = done[world]
        assert not any(codes), '\n'.join(o[-3000:] for o in logs)
        return folder
    return get

def load(folder, name, world): return [torch.load(folder/f'{name}.{r}', weights_only=False) for r in range(world)]

@pytest.mark.parametrize('world,name', [(w,k) for w,ks in worlds.items() for k in ks if k!='cycle'])
def test_same_as_one_process(world, name, results, monkeypatch, tmp_path):
    monkeypatch.setenv('SEVERAL_PATH', str(tmp_path))
    alone = result(cases[name].alone(world))
    assert alone['n_steps']>0
    for r,several in enumerate(load(results(world), name, world)):
        for k in alone:
            if k!='seen' and k not in cases[name].but: assert rel(several[k], alone[k])[0]<=AMPLIFIED.get(name, TOL), (r, *rel(several[k], alone[k], k))

@pytest.mark.parametrize('name', ['events','events_long','events_weighed'])
def test_every_event(name, results):
    "Callbacks of any order see what they see in one process that trains on the large batches, the loss included"
    alone = cases[name].alone(2).seen
    for several in load(results(2), name, 2):
        assert [o[:-1] for o in several['seen']]==[o[:-1] for o in alone]
        assert rel(several['seen'], alone)[0]<=TOL and len(alone)>100

def test_messages_of_a_window(results):
    "Two windows of four: one reduction of the gradients each, of the bytes of one batch, and one small message"
    n_bytes = sum(p.numel()*8 for p in small_model().parameters())
    for several in load(results(2), 'messages', 2):
        sent = [o for o,_ in several['seen']]
        assert sent==[[8,32], [], [], [n_bytes,24], [], [], [], [n_bytes,24]]   # first the number of windows, once an epoch

def test_messages_of_varying_sizes(results):
    "One more small message at each micro-batch"
    n_bytes = sum(p.numel()*8 for p in small_model().parameters())
    for several in load(results(2), 'messages_sized', 2):
        sent = [o for o,_ in several['seen']]
        assert sent==[[16,8,32,24], [24,n_bytes,24], [24], [24,n_bytes,24]]   # first the sizes and the number of windows, once an epoch

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

def test_a_schedule_over_varying_sizes(results):
    "It is the same in all processes, and comes to its end"
    a,b = load(results(2), 'cycle', 2)
    assert a['hps']==b['hps'] and a['pct_train']==b['pct_train'] and len(a['lrs'])==6
    assert a['pct_train']==pytest.approx(1)

@pytest.mark.parametrize('name', refused)
def test_refused(name, tmp_path):
    "The process in which it happens says so, and the other one does not wait for ever"
    codes,logs = run(2, tmp_path, [name], limit=100)
    assert all(codes) and refused[name] in logs[1], logs[1][-3000:]
    assert 'AccumulateStep: another process has ended' in logs[0] or refused[name] in logs[0], logs[0][-3000:]

script = '''
from fastai.basics import *
from fastai.distributed import *
from fastai_accum.all import *

gpu = torch.cuda.device_count()>=2
def on_cpu(self, t, rank): t = LongTensor(t); torch.distributed.broadcast(t, rank); return t.tolist()
if not gpu: DistributedDL._broadcast = on_cpu   # fastai's moves it to a GPU

x,y = torch.randn(90, 6, generator=torch.Generator().manual_seed(0)).double(),torch.arange(90)%3

def get_learner(dl):
    set_seed(0)
    norm = nn.BatchNorm1d(8) if gpu else nn.LayerNorm(8)   # synchronised batch norm needs GPUs
    model = nn.Sequential(nn.Linear(6,8), norm, nn.ReLU(), nn.Linear(8,3)).double()
    valid = DataLoader(list(zip(x,y)), bs=15)
    return Learner(DataLoaders(dl, valid), model, loss_func=nn.CrossEntropyLoss(), default_cbs=False, cbs=[TrainEvalCallback(), AccumulateStep(n_step=2)])

def train():
    learn = get_learner(DataLoader(list(zip(x,y)), bs=9))
    with learn.distrib_ctx(cpu=not gpu, sync_bn=gpu): learn.fit(2, .01)
    device = next(learn.model.parameters()).device
    joined = [torch.cat([torch.arange(i, i+9), torch.arange(45+i, 54+i)]) for i in range(0, 45, 9)]   # the micro-batches of both processes
    alone = get_learner(DataLoader([(x[i].to(device),y[i].to(device)) for i in joined], bs=None))
    alone.dls.loaders[1] = DataLoader([(x.to(device),y.to(device))], bs=None)
    alone.model.to(device)
    alone.fit(2, .01)
    a,b = (torch.cat([o.double().flatten() for o in l.model.state_dict().values()]) for l in (learn,alone))
    err,c = (a-b).norm()/b.norm(),learn.accumulate_step.counts
    assert err<=1e-12, err
    print(f'process {rank_distrib()} of {num_distrib()}: {c.n_steps} steps, {c.n_stepped} samples', flush=True)
'''
def launched(how, folder):
    "The lines that the processes print when `how` starts them"
    (folder/'train.py').write_text(script + '\nif __name__=="__main__": train()')
    (folder/'notebook.py').write_text(script + f'\nfrom accelerate import notebook_launcher\nnotebook_launcher(train, num_processes=2, use_port="{free_port()}")')
    port = str(free_port())
    args = dict(torchrun=['-m', 'torch.distributed.run', '--nproc_per_node', '2', '--master_port', port, 'train.py'],
                accelerate=['-m', 'accelerate.commands.launch', '--multi_gpu', '--num_processes', '2', '--main_process_port', port, 'train.py'],
                notebook_launcher=['notebook.py'])[how]
    env = {**os.environ, 'PYTHONPATH':str(Path(__file__).resolve().parent.parent), 'PYTHONWARNINGS':'ignore', 'OMP_NUM_THREADS':'1'}
    res = subprocess.run([sys.executable, *args], cwd=folder, env=env, capture_output=True, text=True, timeout=150)
    assert not res.returncode, res.stdout+res.stderr[-3000:]
    return sorted(re.findall(r'process \d of 2: \d+ steps, \d+ samples', res.stdout))

EXPECTED = [f'process {r} of 2: 6 steps, 90 samples' for r in range(2)]   # 45 samples an epoch in each: windows of 18, 18 and 9

@pytest.mark.parametrize('how', ['torchrun','accelerate','notebook_launcher'])
def test_launched(how, tmp_path, monkeypatch):
    "A script in `distrib_ctx`, however it is started, trains what one process trains"
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    assert launched(how, tmp_path)==EXPECTED

@pytest.mark.skipif(torch.cuda.device_count()<2, reason='trains on two GPUs with NCCL and synchronised batch norm, and this machine has fewer')
@pytest.mark.parametrize('how', ['torchrun','accelerate'])
def test_on_gpus(how, tmp_path):
    "The same with NCCL and synchronised batch norm, whose running statistics are compared too"
    assert launched(how, tmp_path)==EXPECTED
