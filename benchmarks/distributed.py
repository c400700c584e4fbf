"""Seconds and bytes of a window on two processes, for fastai's callback and for `AccumulateStep`, over a link that is made slow.
Then the seconds and messages of a batch with `SyncBatchNorm`: whole, in plain DDP, and in slices with `MicroBatch(bs, exact=True)`.

    python benchmarks/distributed.py           # print the tables, about three minutes
    python benchmarks/distributed.py --save    # and write them to distributed.json and synced.json in benchmarks/results, which the page shows

If you are root on Linux, each process gets a network namespace of its own, and the link between them carries 200 Mbit a second (`tc`). Otherwise the
processes use the loopback device as it is, and the table says so."""
import argparse,os,pickle,socket,statistics,subprocess,sys,tempfile,time,warnings
from common import *
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.callback.training import GradientAccumulation
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.autograd import Function
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel
import torch.distributed as dist
from fastai_accum.all import *

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
    "Add the bytes of each message that `all_reduce` and `all_gather` get to the list `sent`"
    plain = {'all_reduce':dist.all_reduce, 'all_gather':dist.all_gather}
    def all_reduce(t, *args, **kwargs):
        sent.append(t.nbytes)
        return plain['all_reduce'](t, *args, **kwargs)
    def all_gather(ts, t, *args, **kwargs):
        sent.append(t.nbytes)
        return plain['all_gather'](ts, t, *args, **kwargs)
    dist.all_reduce,dist.all_gather = all_reduce,all_gather
    try: yield
    finally: dist.all_reduce,dist.all_gather = plain.values()

def take_turns(learns, pairs, n):
    "The seconds of a batch or window, of which an epoch has `n`, and all messages, for each learner; their epochs take turns `pairs` times"
    for l in learns: l.fit(1)
    secs,sent = [[] for _ in learns],[[] for _ in learns]
    for i in range(pairs):
        for k in list(range(len(learns)))[::1 if i%2 else -1]:
            dist.barrier()
            with counting(sent[k]): secs[k].append(clock(lambda: learns[k].fit(1))/n)
    return secs,[(len(o)/pairs/n,sum(o)/pairs/n) for o in sent]

def measure(n_step, pairs):
    "The seconds and the messages of a window, for fastai's callback and for ours"
    return take_turns([learner(n_step, GradientAccumulation(BS*n_step)),learner(n_step, AccumulateStep(n_step))], pairs, N_WINDOWS)

class OnCpu(Function):
    "What `SyncBatchNorm` computes on a GPU, with the same messages; PyTorch has no code for CPUs"
    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, eps, momentum, group, world):
        by = lambda v: v.view(1, -1, *[1]*(x.ndim-2))
        dims = [0,*range(2, x.ndim)]
        var,mean = torch.var_mean(x, dims, correction=0)
        mine = torch.cat([mean, var, mean.new_full((1,), x.numel()/x.shape[1])])
        rows = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(rows, mine, group)
        parts = [r.split([len(mean),len(mean),1]) for r in rows]
        n = sum(c for *_,c in parts)
        m = sum(c*o for o,_,c in parts)/n
        v = sum(c*(o+(k-m)**2) for k,o,c in parts)/n
        running_mean.lerp_(m, momentum); running_var.lerp_(v*n/(n-1), momentum)
        inv = (v+eps).rsqrt()
        norm = (x-by(m))*by(inv)
        ctx.save_for_backward(norm, weight, inv, n)
        ctx.group,ctx.by,ctx.dims = group,by,dims
        return norm*by(weight)+by(bias)
    @staticmethod
    def backward(ctx, dy):
        (norm,weight,inv,n),by = ctx.saved_tensors,ctx.by
        db,dw = dy.sum(ctx.dims),(dy*norm).sum(ctx.dims)
        sums = torch.cat([db,dw])
        dist.all_reduce(sums, group=ctx.group)
        a,b = sums.chunk(2)
        return ((dy-by(a/n)-norm*by(b/n))*by(weight*inv), dw, db, *[None]*6)

class CpuIsGpu:
    "PyTorch, for which the CPU is a backend of somebody else: `SyncBatchNorm` refuses CPUs"
    def __init__(self, o, **kwargs): self.o = o; vars(self).update(kwargs)
    def __getattr__(self, k): return getattr(self.o, k)

def on_cpus():
    DistributedDataParallel._passing_sync_batchnorm_handle = noop   # it refuses CPUs, too
    batchnorm.torch = CpuIsGpu(torch, _C=CpuIsGpu(torch._C, _get_privateuse1_backend_name=lambda: 'cpu'))
    batchnorm.sync_batch_norm = OnCpu

def convs(n=8, width=64):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(3 if i==0 else width, width, 3, padding=1, bias=False), nn.SyncBatchNorm(width), nn.ReLU()) for i in range(n)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

def synced(pairs, bs=32, n_batches=3):
    "The seconds and the messages of a batch, whole and in slices"
    on_cpus()
    def learner(*cbs):
        g = torch.Generator().manual_seed(dist.get_rank())
        batches = [(torch.randn(bs,3,8,8,generator=g), torch.randint(10,(bs,),generator=g)) for _ in range(n_batches)]
        dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None))
        model = DistributedDataParallel(convs())
        model.register_comm_hook(None, allreduce_hook)
        return Learner(dls, model, nn.CrossEntropyLoss(), SGD, 1e-3, trainable_params, cbs=[TrainEvalCallback, NoValid(), *cbs], default_cbs=False)
    learns = [learner(), *(learner(MicroBatch(k, exact=True)) for k in (bs,bs//2,bs//4))]
    for l in learns: l.fit(1)
    flat = [torch.cat([o.detach().double().flatten() for o in l.model.state_dict().values()]) for l in learns]
    for o in flat[1:]: assert (o-flat[0]).norm()/flat[0].norm()<1e-5
    return take_turns(learns, pairs, n_batches)

def worker(rank, address, port, pairs, out):
    os.environ.update(RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR=address, MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    res = {n:measure(n, pairs) for n in STEPS},synced(pairs)
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
            env = {**os.environ, 'OMP_NUM_THREADS':'1', 'MALLOC_MMAP_MAX_':'0', 'MALLOC_TRIM_THRESHOLD_':str(10**11), **({'GLOO_SOCKET_IFNAME':f'fav{r}'} if slow else {})}
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

def ratio(a, b):
    "The median of the ratios `a`/`b` of epochs that took turns, and its 95 % interval"
    return '{:.2f} ± {:.2f}'.format(*middle([x/y for x,y in zip(a,b)]))

def rows(res):
    for n,((theirs,ours),((_,b_theirs),(_,b_ours))) in res.items():
        secs = f'{statistics.median(theirs):.2f}',f'{statistics.median(ours):.2f}',ratio(ours, theirs)
        yield [n, *secs, f'{b_theirs/2**20:.1f}', f'{b_ours/2**20:.1f}', f'{b_ours/b_theirs:.3f}']

def synced_rows(secs, sent):
    names = 'the whole batch of 32, plain DDP',*(f'MicroBatch({k}, exact=True)' for k in (32,16,8))
    for name,t,(n,n_bytes) in zip(names, secs, sent):
        yield [name, f'{statistics.median(t):.3f}', ratio(t, secs[0]) if t is not secs[0] else '1', f'{n:.3g}', f'{n_bytes/2**10:.0f}']

if __name__=='__main__':
    p = argparse.ArgumentParser()
    for o in 'rank','port': p.add_argument(f'--{o}', type=int)
    for o in 'address','out': p.add_argument(f'--{o}')
    p.add_argument('--pairs', type=int, default=12); p.add_argument('--save', action='store_true')
    a = p.parse_args()
    if a.rank is not None: worker(a.rank, a.address, a.port, a.pairs, a.out)
    else:
        (res,of_norms),link = run(a.pairs)
        res,of_norms = list(rows(res)),list(synced_rows(*of_norms))
        cols = ['n_step', "seconds a window, fastai's", 'AccumulateStep', 'ratio', "MiB a window, fastai's", 'AccumulateStep', 'ratio']
        norm_cols = ['eight SyncBatchNorm', 'seconds a batch', 'ratio', 'messages a batch', 'KiB a batch']
        print(table(res, cols)); print(table(of_norms, norm_cols)); print(f'2 processes, link {link}; {a.pairs} pairs; {machine()}')
        if a.save:
            save('distributed', rows=res, cols=cols, link=link, pairs=a.pairs)
            save('synced', rows=of_norms, cols=norm_cols, link=link, pairs=a.pairs)
