"""Seconds and bytes of a window on two processes, for fastai's callback and for `AccumulateStep`, over a link that is made slow.

    python benchmarks/distributed.py           # print the table, about two minutes
    python benchmarks/distributed.py --save    # and write it to benchmarks/results/distributed.json, which the page shows

If you are root on Linux, each process gets a network namespace of its own, and the link between them carries 200 Mbit a second (`tc`). Otherwise the
processes use the loopback device as it is, and the table says so."""
import argparse,os,pickle,socket,statistics,subprocess,sys,tempfile,time,warnings
from common import *
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.callback.training import GradientAccumulation
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
import torch.distributed as dist
from fastai_accum.core import AccumulateStep

BS,N_WINDOWS,STEPS,RATE = 16,3,(2,4,8),'200mbit'

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256,1024), nn.GELU(), nn.Linear(1024,1024), nn.GELU(), nn.Linear(1024,10))   # 1.3 million parameters

def learner(n_step, cb):
    "A learner of this process, whose epoch is `N_WINDOWS` windows"
    g = torch.Generator().manual_seed(dist.get_rank())
    batches = [(torch.randn(BS,256,generator=g), torch.randint(10,(BS,),generator=g)) for _ in range(N_WINDOWS*n_step)]
    dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None))
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, allreduce_hook)   # so that all messages go through `all_reduce`, which `counting` counts
    cbs = [TrainEvalCallback, NoValid(), cb]
    return Learner(dls, model, nn.CrossEntropyLoss(), SGD, 1e-3, trainable_params, cbs=cbs, default_cbs=False)

@contextmanager
def counting(sent):
    "Add up the bytes that `all_reduce` gets, in `sent[0]`"
    plain = dist.all_reduce
    def count(t, *args, **kwargs):
        sent[0] += t.nbytes
        return plain(t, *args, **kwargs)
    dist.all_reduce = count
    try: yield
    finally: dist.all_reduce = plain

def measure(n_step, pairs):
    "The seconds and the bytes of a window, for fastai's callback and for ours, whose epochs take turns `pairs` times"
    learns = learner(n_step, GradientAccumulation(BS*n_step)),learner(n_step, AccumulateStep(n_step))
    for l in learns: l.fit(1)
    secs,sent = ([],[]),([0],[0])
    for i in range(pairs):
        for k in (0,1) if i%2 else (1,0):
            dist.barrier()
            with counting(sent[k]): secs[k].append(clock(lambda: learns[k].fit(1))/N_WINDOWS)
    return secs,[n/pairs/N_WINDOWS for n, in sent]

def worker(rank, address, port, pairs, out):
    os.environ.update(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR=address, MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    res = {n:measure(n, pairs) for n in STEPS}
    if rank==0: Path(out).write_bytes(pickle.dumps(res))
    dist.barrier()   # the store lives in process 0
    dist.destroy_process_group()

def sh(s, check=True): return subprocess.run(s.split(), check=check, capture_output=True).returncode==0

def slow_link():
    "Make two network namespaces with a slow link between them, and say whether we were allowed to"
    try:
        for i in 0,1: sh(f'ip netns add fa{i}')
        sh('ip link add fav0 netns fa0 type veth peer name fav1 netns fa1')
        for i in 0,1:
            tc = f'tc qdisc add dev fav{i} root tbf rate {RATE} burst 256kbit latency 100ms'
            for s in f'ip addr add 10.77.0.{i+1}/24 dev fav{i}', f'ip link set fav{i} up', 'ip link set lo up', tc: sh(f'ip netns exec fa{i} {s}')
        return True
    except (OSError,subprocess.CalledProcessError): no_link(); return False

def no_link():
    for i in 0,1: sh(f'ip netns del fa{i}', check=False)

def run(pairs):
    "Start both processes, and return their results and the link that they used"
    try: slow = slow_link()
    except FileNotFoundError: slow = False
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    address = '10.77.0.1' if slow else '127.0.0.1'
    with tempfile.TemporaryDirectory() as d:
        out = Path(d)/'out'
        def start(r):
            env = {**os.environ, 'OMP_NUM_THREADS':'1', **({'GLOO_SOCKET_IFNAME':f'fav{r}'} if slow else {})}
            args = dict(rank=r, address=address, port=port, pairs=pairs, out=out)
            cmd = [sys.executable, '-W', 'ignore', __file__, *[str(o) for k,v in args.items() for o in (f'--{k}',v)]]
            return subprocess.Popen((['ip','netns','exec',f'fa{r}'] if slow else [])+cmd, env=env)
        ps = [start(r) for r in (0,1)]
        try: codes = [p.wait(900) for p in ps]
        finally:
            for p in ps: p.kill()
            if slow: no_link()
        assert not any(codes), codes
        return pickle.loads(out.read_bytes()),f'{RATE[:-4]} Mbit/s' if slow else 'loopback, as fast as it is'

def rows(res):
    for n,((theirs,ours),(b_theirs,b_ours)) in res.items():
        ratios = sorted(o/t for o,t in zip(ours,theirs))
        k = int(len(ratios)/2-0.98*len(ratios)**.5)
        noise = (ratios[len(ratios)-1-k]-ratios[k])/2
        secs = f'{statistics.median(theirs):.2f}',f'{statistics.median(ours):.2f}',f'{statistics.median(ratios):.2f} ± {noise:.2f}'
        yield [n, *secs, f'{b_theirs/2**20:.1f}', f'{b_ours/2**20:.1f}', f'{b_ours/b_theirs:.3f}']

if __name__=='__main__':
    p = argparse.ArgumentParser()
    for o in 'rank','port': p.add_argument(f'--{o}', type=int)
    for o in 'address','out': p.add_argument(f'--{o}')
    p.add_argument('--pairs', type=int, default=12); p.add_argument('--save', action='store_true')
    a = p.parse_args()
    if a.rank is not None: worker(a.rank, a.address, a.port, a.pairs, a.out)
    else:
        res,link = run(a.pairs)
        res = list(rows(res))
        cols = ['n_step', "seconds a window, fastai's", 'AccumulateStep', 'ratio', "MiB a window, fastai's", 'AccumulateStep', 'ratio']
        print(table(res, cols)); print(f'2 processes, link {link}; {a.pairs} pairs; {machine()}')
        if a.save: save('distributed', rows=res, cols=cols, link=link, pairs=a.pairs)
