"""What several processes train, and what one process trains on the same samples: started by `test_processes`, once for
each number of processes.

    python several.py RANK WORLD FOLDER CASE..."""
import os,signal,sys
from contextlib import nullcontext
from nets import *
from fastai.distributed import *
from fastai_accum.core import *
from fastai_accum.microbatch import *
import fastai_accum.all   # for `exact=True`
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel as DDP
import torch.distributed as dist
import torch.distributed.nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future
from torch.utils._pytree import tree_flatten,tree_map
from datetime import timedelta

N = 96
W = torch.tensor([1.,10.,3.]).double()

def cut(world, sizes):
    "The samples of each micro-batch, for each process. `sizes` is one list for all processes, or one for each"
    sizes = sizes if is_listy(sizes[0]) else [sizes]*world
    res,i = [[] for _ in range(world)],iter(range(N))
    for k in range(max(map(len, sizes))):
        for o,s in zip(res, sizes): o += [list(itertools.islice(i, n)) for n in s[k:k+1]]
    return res

def placed(o): return o.to(here.device) if here.device else o   # where this process trains
def batches(idxs, y): return [(placed(features(N)[i]), placed(y[i])) for i in idxs]

def once(learn, **kwargs): learn.fit_one_cycle(2, .02, **kwargs)
def rank(): return int(os.environ.get('RANK', 0))
def cancel(): raise CancelBatchException

def counted_late(learn):
    "A process that has cancelled its part of a window, late, has no sample in its step"
    once(learn)
    if isinstance(learn.model, DDP): assert learn.accumulate_step.counts.sizes==[0 if rank()==0 else 16,16]*2

class Case:
    "Micro-batches of each process, and how they are trained on; `one` makes the callbacks of the one process"
    def __init__(self, sizes, n_step=4, y=None, loss_func=None, cbs=list, one=None, model=small_model, fit=once,
                 wrap=DDP, acc=None, left_out=(), leave='after_loss', joins=None, first=noop, but=()):
        store_attr()
        self.y,self.one = classes(N) if y is None else y,one or cbs
    def dls(self, idxs):
        return DataLoaders(DataLoader(batches(idxs, self.y), bs=None),
                           DataLoader(batches([list(range(16))], self.y), bs=None), device=here.device)
    def train(self, dls, model, cbs):
        learn = make_learner(dls, model, loss_func=self.loss_func, splitter=trainable_params, cbs=cbs)
        self.fit(learn)
        return learn
    def callbacks(self, rank):
        "With one that leaves out the micro-batches that the case names"
        drops = raising(CancelBatchException, self.leave, lambda cb: (rank,cb.micro.i) in self.left_out)
        return [AccumulateStep(**{'n_step':self.n_step, **(self.acc or {})}), drops, *L(self.cbs())]
    def several(self, rank, world):
        "What process `rank` of `world` trains"
        self.first(rank, world)
        learn = self.train(self.dls(cut(world, self.sizes)[rank]), self.wrap(placed(self.model())),
                           self.callbacks(rank))
        assert learn.model.require_backward_grad_sync and 'forward' not in vars(learn.model), 'something is left behind'
        return learn
    def windows(self, world):
        "The samples of each window of all processes together"
        cuts = cut(world, self.sizes)
        if self.joins: return self.joins(cuts)
        kept = [[m if (r,j) not in self.left_out else [] for j,m in enumerate(c)] for r,c in enumerate(cuts)]
        at = [[i for c in kept for m in c[k:k+1] for i in m] for k in range(max(map(len, cuts)))]
        return [w for o in chunked(at, self.n_step) if (w := sum(o, []))]
    def alone(self, world):
        "What one process trains on the large batches"
        return self.train(self.dls(self.windows(world)), self.model(), self.one())

def two(never=False):
    "A branch that is used only where the first feature of the first sample is positive, or never"
    def f(m, x):
        if never or not (x[:,0]>.5).any(): return m.a(x)
        return m.a(x)+m.b(x)*(x[:,:1]>.5).double()
    torch.manual_seed(0)
    return Made(f, a=nn.Linear(6,3), b=nn.Linear(6,3)).double()

class Buffered(nn.Module):
    "A model with a buffer, which the processes exchange in the first forward pass after a step"
    def __init__(self): super().__init__(); self.body = small_model(); self.register_buffer('b', torch.ones(3).double())
    def forward(self, x): return self.body(x)*self.b

def cut_unequally(learn):
    "A fit that is cancelled when process 1 has run the model and process 0 has not"
    stop = raising(CancelTrainException, 'before_batch', lambda cb: cb.micro.i==1)
    first = raising(CancelBatchException, 'before_batch', lambda cb: cb.micro.i==0 and rank()==0)
    if isinstance(learn.model, DDP): learn.fit(1, .02, cbs=[stop, first])
    learn.spy.steps = []
    learn.fit(1, .02)

def with_train_metrics(learn):
    learn.recorder.train_metrics,learn.metrics = True,accuracy
    learn.fit(1, .02)

def find(learn):
    learn.path = Path(os.environ['SEVERAL_PATH'])
    learn.lr_find(show_plot=False, suggest_funcs=None, num_it=12, stop_div=False)

def of(value, *which):
    "Targets, in which those of some samples have this value and no others do"
    y = classes(N).clamp(min=value+1)
    y[[i for w in which for i in w]] = value
    return y

weighted,uneven = nn.CrossEntropyLoss(weight=W),[[1,7,2,5,3], [6,1,4,2,2], [3,3,1,1,5]]
cases = dict(
    tail          = Case([4]*6),
    one_window    = Case([4]*2),
    events_weighed= Case(uneven, cbs=probes, loss_func=weighted),
    no_accum      = Case([4]*3, n_step=1),
    one_is_empty  = Case([4]*4, y=of(-100, range(0,4), range(12,16), range(8,12))),
    dropped_last  = Case([4]*8, left_out={(0,3),(1,7)}),
    dropped_all   = Case([4]*8, left_out={(1,0),(1,1),(1,2),(1,3)}),
    kept_sum      = Case([4]*6, loss_func=nn.CrossEntropyLoss(reduction='sum'), acc=dict(average=False)),
    unused_drop   = Case([4]*8, model=two, wrap=partial(DDP, find_unused_parameters=True), left_out={(0,3),(1,7)}),
    static        = Case([4]*6, wrap=partial(DDP, static_graph=True)),
    short_epoch   = Case([2]*12, n_step=1, fit=lambda l: l.fit(2, .02), cbs=lambda: ShortEpochCallback(.4)),
    early_drop    = Case([4]*8, left_out={(0,3),(1,5)}, leave='before_batch'),
    buffers_drop  = Case([4]*8, model=Buffered, left_out={(0,3),(1,4),(1,5),(1,6),(1,7)}),
    unused_never  = Case([4]*8, model=partial(two, True), wrap=partial(DDP, find_unused_parameters=True),
                         left_out={(1,k) for k in range(4)}),
    static_unused = Case([4]*6, wrap=partial(DDP, find_unused_parameters=True, static_graph=True)),
    cancels_late  = Case([4]*8, left_out={(0,1)}, leave='after_backward', fit=counted_late,
                         joins=lambda cuts: [sum(cuts[1][:4], []), sum((o for c in cuts for o in c[4:]), [])]),
    cut_unequally = Case([4]*8, model=Buffered, fit=cut_unequally),
    rank_weighs_0 = Case([4]*4, loss_func=nn.CrossEntropyLoss(weight=tensor([0.,1.,3.]).double()),
                         y=of(0, range(4,8), range(12,16), range(20,24), range(28,32))),
    train_metrics = Case([4]*6, fit=with_train_metrics),
    shorter_tail  = Case([[4]*8, [4]*6]),
    empty          = Case([[4]*4, []]),
    metrics_uneven = Case([[4]*5, [4]*4], fit=with_train_metrics),
)

def centers(): return Elsewhere('loss')
cases.update(
    centers      = Case([4]*6, cbs=centers),
    centers_drop = Case([4]*8, cbs=centers, left_out={(1,k) for k in range(4)}),
    centers_cut  = Case([[8,5,8], [4,7,4], [2,4,8]], 2, cbs=lambda: [MicroBatch(3), centers()], one=centers),
)

def cpu_broadcast(self, t, rank):
    "`DistributedDL._broadcast` without its `.cuda()`"
    t = LongTensor(t)
    dist.broadcast(t, rank)
    return t.tolist()

class InContext(Case):
    "fastai's `distrib_ctx` splits the samples of one loader, and repeats some if their number cannot be divided"
    def __init__(self, n=90, drop_last=False, patch=False, torch_dl=False, **kwargs):
        super().__init__(None, **kwargs)
        store_attr()
    def several(self, rank, world):
        DistributedDL._broadcast = cpu_broadcast
        dls = make_dls(self.n, 4, self.y[:self.n], self.drop_last, shuffle=False, x=features(N)[:self.n])
        if self.torch_dl: dls.loaders[0] = torch.utils.data.DataLoader(dls.train.dataset, 4, drop_last=self.drop_last)
        learn = make_learner(dls, splitter=trainable_params, cbs=self.callbacks(rank)[self.patch:])
        loader,patch = dls.train,accumulation(self.n_step) if self.patch else nullcontext()
        with learn.distrib_ctx(cpu=True, sync_bn=False), patch: self.fit(learn)
        assert not isinstance(learn.model, DDP) and learn.dls.train is loader, 'the context has left something behind'
        return learn
    def windows(self, world):
        each,k = -(-self.n//world),4*self.n_step
        idxs,n = (list(range(self.n))*2)[:each*world],each//k*k if self.drop_last else each
        return [[i for p in chunked(idxs, each) for i in p[w:min(w+k,n)]] for w in range(0, n, k)]

cases.update(
    ctx_odd      = InContext(89),
    ctx_drop_odd = InContext(59, n_step=2, drop_last=True),
    ctx_drop_63  = InContext(63, n_step=2, drop_last=True),
    ctx_patch    = InContext(patch=True),
    ctx_samples  = InContext(n_step=3, acc=dict(n_samples=20, n_step=None)),
    ctx_torch    = InContext(drop_last=True, torch_dl=True),
    ctx_after    = InContext(fit=lambda l: (l.fit(1, .02), l.fit_one_cycle(1, .02))),
    ctx_scaler   = InContext(cbs=lambda: [OnCpu(init_scale=2.**10, growth_interval=2), GradientClip(.1)]),
)

def scheduled(acc, **kwargs):
    "Windows on a schedule, against one process whose batches are those of all processes together"
    return Case([4]*8, 1, acc=acc, one=lambda: AccumulateStep(**acc), **kwargs)
cases.update(
    sched      = scheduled(dict(n_step=lambda pct: 1 if pct<.3 else 2 if pct<.6 else 3), loss_func=weighted),
    sched_drop = scheduled(dict(n_step=lambda pct: 3, drop_last=True)),
)

class Sent(Callback):
    "Counts the messages of each window until its step"
    run_valid = False
    def before_fit(self):
        self.learn.seen,self.sent,self.plain = [],Counter(),{k:getattr(dist, k) for k in ('all_gather','all_reduce')}
        # goes through `all_reduce`, where it is counted
        if isinstance(self.model, DDP): self.model.register_comm_hook(None, allreduce_hook)
        for k,f in self.plain.items(): setattr(dist, k, partial(self.send, k, f))
    def send(self, k, f, *args, **kwargs):
        self.sent[k] += 1
        return f(*args, **kwargs)
    def before_batch(self):
        acc = vars(self.learn).get('accumulate_step')   # one process has none
        if acc is None or acc.window.n_micro==1: self.sent.clear()
    def before_step(self): self.learn.seen.append(dict(self.sent))
    def after_fit(self):
        for k,f in self.plain.items(): setattr(dist, k, f)

cases['messages'] = Case([4]*8, cbs=Sent, fit=lambda l: l.fit(1, .02))

class Full(Buffered):
    "Runs out of memory in process 1: in the second epoch with more than two samples, or in validation"
    n_full = 0   # in the class, since a second try begins with what the model held before
    def __init__(self, valid=False): super().__init__(); self.valid,self.n = valid,0
    def forward(self, x):
        self.n += 1
        full = len(x)>4 and not self.training if self.valid else len(x)>2 and self.training and self.n>10
        if full and rank()==1:
            Full.n_full += 1
            raise RuntimeError('CUDA out of memory')
        return super().forward(x)

def runs_out(learn):
    Full.n_full = 0
    once(learn)
    assert Full.n_full or rank()!=1, 'memory has not run out'

def exact_in_each(rank, world):
    "Each process's batch norm and dropout see its own whole batches, in slices or not"
    def one(*cbs):
        set_seed(rank)
        def model(): return normed(nn.Dropout(.2))
        return Case([[8,5,8], [4,7,4], [2,4,8]], 2, model=model, cbs=lambda: cbs).several(rank, world)
    assert_same(one(MicroBatch(3, exact=True)), one())

cases.update(   # slices in several processes, and none in the one process
    cut          = Case(uneven, cbs=lambda: MicroBatch(2), one=list),
    cut_coupled  = Case(uneven, cbs=lambda: MicroBatch(2, coupled=True), one=list),
    auto         = Case([4]*8, cbs=MicroBatch, one=list, model=Full, fit=runs_out),
    auto_coupled = Case([4]*8, cbs=lambda: MicroBatch(coupled=True), one=list, model=Full, fit=runs_out),
    auto_valid   = Case([4]*8, cbs=MicroBatch, one=list, model=partial(Full, True), fit=runs_out),
    exact_uneven = Case([4]*6, first=exact_in_each),
)

class CpuIsGpu:
    "PyTorch, in which the backend that others have registered is the CPU"
    def __init__(self, o, **kwargs): self.o = o; vars(self).update(kwargs)
    def __getattr__(self, k): return getattr(self.o, k)

def sums(x, weight, bias, running_mean, running_var, eps, momentum, group, world):
    "What `SyncBatchNorm` computes on a GPU, by sums that autograd knows"
    add = partial(torch.distributed.nn.functional.all_reduce, group=group)
    n = add(x.new_tensor(len(x)))
    mean = add(x.sum(0))/n
    var = add((x-mean).pow(2).sum(0))/n
    running_mean.lerp_(mean.detach(), momentum)
    running_var.lerp_(var.detach()*n/(n-1), momentum)
    return (x-mean)/(var+eps).sqrt()*weight+bias

def on_cpus():
    """PyTorch's DDP refuses `SyncBatchNorm` on CPUs, and `SyncBatchNorm` refuses their tensors: step around both. What
    it would call has no code for CPUs: with `exact=True` it is not called, and otherwise `sums` stands in for it"""
    if here.device: return
    DDP._passing_sync_batchnorm_handle = noop
    batchnorm.torch = CpuIsGpu(torch, _C=CpuIsGpu(torch._C, _get_privateuse1_backend_name=lambda: 'cpu'))
    batchnorm.sync_batch_norm = SimpleNamespace(apply=sums)

class Norms(nn.Module):
    "Two batch norms, of which one is conditional, one layer between them, and maybe a norm whose output is not used"
    def __init__(self, how=''):
        super().__init__()
        torch.manual_seed(0)
        norm = partial(nn.BatchNorm1d, 8, affine=how!='plain', track_running_stats=how!='untracked',
                       momentum=None if how=='cumulates' else .1)
        self.a,self.b,self.c = (nn.Linear(*o, bias=False) for o in ((6,8),(8,8),(8,3)))
        self.m,self.n,self.o = norm(),norm(),norm() if how=='unused' else noop
        self.frozen,self.skips = how=='frozen',False
        self.double()
    def train(self, mode=True):
        super().train(mode)
        if self.frozen: self.m.eval()
        return self
    def forward(self, x):
        x = self.b(self.m(self.a(x)).tanh())
        self.o(x)
        return self.c((x if self.skips else self.n(x)).tanh())

def skips(cb): get_model(cb.model).skips = bool(cb.iter%2)   # leaves out a norm in every other batch
def skipping(): return Callback(before_batch=skips)
def exact(*sizes): return lambda: [MicroBatch(sizes[rank()%len(sizes)], exact=True)]

def synced(model, wrap=DDP, group=None):
    "`model` with ordinary batch norm synchronised, over all processes or those of `group`"
    on_cpus()
    return wrap(nn.SyncBatchNorm.convert_sync_batchnorm(model, group).train())
def in_groups(model): return synced(model, group=[dist.new_group(o) for o in ([0,1],[1,2])][rank()==2])

def over_all(sizes, bs=(3,), n_step=1, cbs=None, one=list, model=Norms, wrap=synced, **kwargs):
    "Batch norm over all processes and slices, against ordinary batch norm on the batches of all processes"
    # fastai's optimizers mark the parameters of ordinary batch norm, and do not decay them
    return Case(sizes, n_step, cbs=cbs or exact(*bs), one=one, model=model, wrap=wrap, but=['opt'],
                fit=partial(once, wd=0.), **kwargs)

def slices(c):
    "Plain slices see the slices of all processes, as if these were the micro-batches of one process"
    return [[i for o in c for i in o[k][j:j+4]] for k in range(4) for j in (0,4)]

threes = [[9,5,8], [4,7,3], [6,2,5]]
cases.update(
    synced           = over_all([24,24], (12,20)),
    synced_one       = over_all([[9,5,8], [4,1,3]], (3,5)),   # a batch of one sample, in one process
    synced_weighed   = over_all(threes, (3,5), loss_func=weighted),
    synced_accum     = over_all(threes, cbs=list, loss_func=weighted),
    **{f'synced_{o}':over_all([8]*4, (3,5), model=partial(Norms, o))
       for o in ('plain','untracked','cumulates','frozen','unused')},
    synced_skips     = over_all([8]*5, cbs=lambda: [skipping(), *exact(3, 5)()], one=skipping),
    synced_messages  = over_all([12]*4, cbs=lambda: [Sent(), *exact(2, 6)()]),
    synced_slices    = over_all([8]*4, cbs=lambda: MicroBatch(4), one=lambda: AccumulateStep(2), joins=slices),
    # the loss sees the whole batch, and running statistics move once
    synced_coupled   = over_all([8]*4, cbs=lambda: MicroBatch(4, coupled=True),
                                one=lambda: MicroBatch(8, coupled=True),
                                joins=lambda c: [a+b for a,b in chunked(slices(c), 2)]),
)

def refused(bad, says, error=ValueError, own=None, good=None):
    "All processes refuse the case `bad` with the same error, or process 1 with its `own` error; then they train `good`"
    def first(rank, world):
        is_own = own and rank==1
        with pytest.raises(own if is_own else error, match=None if is_own else says): bad.several(rank, world)
    good = good or Case([4]*6)
    good.first = first
    return good

def sharded(model): return fully_shard(model, mesh=init_device_mesh('cpu', (dist.get_world_size(),)))

def refused_exact(cbs, says, error=RuntimeError, **kwargs):
    return refused(over_all([[8]*3, [12]*3, [4]*3], cbs=cbs, **kwargs), says, error,
                   good=over_all([[8]*3, [12]*3, [4]*3], (3,5)))

def leaves(error):
    "By a callback of one process, in the middle of a window"
    leave = lambda: raising(error, 'after_loss', lambda cb: cb.iter==1 and rank()==1)
    return refused(Case([4]*8, cbs=leave), '1 leaves the epoch', RuntimeError)

waits = 'lr_find waits for ever in several processes'
alike = 'process 0 cuts a batch into 3 slices, but process 1 cuts a batch into 4 slices'
cases.update(
    recovers        = refused(Case([[4]*9, [4]*4]), 'has no more batches', RuntimeError),
    **{f'leaves_{k}':leaves(o) for k,o in dict(epoch=CancelEpochException, fit=CancelFitException).items()},
    shards          = refused(Case([4]*8, wrap=sharded), 'fully_shard'),
    lr_find         = refused(Case([4]*6, fit=find), waits),
    ctx_find        = refused(InContext(fit=find), waits),
    refuses_plain   = refused_exact(lambda: MicroBatch(3), alike),
    refuses_coupled = refused_exact(lambda: MicroBatch(3, coupled=True), alike),
    refuses_auto    = refused_exact(lambda: MicroBatch(exact=True), 'bs must be a number', ValueError),
    refuses_plain_auto = refused_exact(MicroBatch, 'bs must be a number', ValueError),
    refuses_ignored = refused_exact(exact(3,5), 'process 0 is back at batch norm 2 of a batch, but process 1 ends a '
                                    'window', y=of(-100, range(28,40))),   # those of process 1 in the second batch
    refuses_bare    = refused_exact(exact(3), 'in DistributedDataParallel', ValueError,
                                    wrap=partial(synced, wrap=noop)),
    refuses_groups  = refused_exact(exact(3,5), 'leave out its process_group', ValueError, wrap=in_groups),
)

def parts(name, **kwargs):
    "Process 1 does what others do not, from its second window on"
    def on(f): return lambda cb: f(cb) if rank()==1 and cb.training and cb.micro.i>3 else None
    cbs = lambda: Callback(**{k:on(f) for k,f in kwargs.items()})
    return refused(Case([4]*8, cbs=cbs), f'process 1 does not have the {name} of process 0', RuntimeError)

def no_step(cb): raise CancelStepException
def clips(cb): nn.utils.clip_grad_norm_(cb.model.parameters(), 1e-3)
def moves(cb): next(cb.model.parameters()).data.mul_(1.001)
cases.update(
    parts_steps   = parts('number of steps', before_step=no_step),
    parts_rate    = parts('hyper-parameters', after_loss=lambda cb: cb.opt.set_hypers(lr=.5)),
    parts_clip    = parts('weights', before_step=clips),
    parts_weights = parts('weights', after_batch=moves),
    parts_at_end  = refused(Case([4]*4, fit=lambda l: l.fit(1, .02), cbs=lambda: Callback(before_step=lambda cb:
                            no_step(cb) if rank()==1 else None)), 'number of steps', RuntimeError),
    leaves_all    = refused(Case([4]*8, left_out={(1,k) for k in range(4)}, leave='before_batch'), 'hyper-parameters',
                            RuntimeError),
    centers_global = refused(Case([4]*6, cbs=lambda: Elsewhere('global')), 'nobody knows which', RuntimeError),
)

def had_enough(): raise ValueError('process 1 has had enough')
def ctrl_c(): raise KeyboardInterrupt
def killed(): os.kill(os.getpid(), signal.SIGKILL)

def broken(f=had_enough, i=1, event='model'):
    "Process 1 calls `f` in batch `i`: between two norms, in the loader or at an event"
    now = SimpleNamespace(i=-1)
    def stop(*_):
        if rank()==1 and now.i==i: f()
    def loads(cb):
        plain = cb.dls.train.create_item
        cb.dls.train.create_item = lambda k: f() if rank()==1 and k==i else plain(k)
    def hook(m, x, y):
        if event=='model': stop()
        if event=='backward' and y.requires_grad: y.register_hook(stop)
    def norms():
        m = Norms()
        m.b.register_forward_hook(hook)
        return m
    at = {} if event in ('model','backward') else dict(before_fit=loads) if event=='loader' else {event:stop}
    count = Callback(before_batch=lambda cb: setattr(now, 'i', cb.iter))
    return over_all([8]*4, model=norms, cbs=lambda: [*exact(3,5)(), count, Callback(**at)])

def breaks(*args, own=ValueError, says='process 1 has failed', **kwargs):
    return refused(broken(*args, **kwargs), says, RuntimeError, own, over_all([8]*4, (3,5)))

ends = dict(own=RuntimeError, says='1 ends a window')
cases.update(
    **{f'breaks_{o}':breaks(event=o) for o in ('model','backward','after_loss','before_batch','loader')},
    breaks_at_first = breaks(i=0),
    breaks_ctrl_c   = breaks(ctrl_c, own=KeyboardInterrupt),
    leaves_out      = breaks(cancel, event='after_loss', **ends),
    leaves_out_all  = breaks(cancel, event='before_batch', **ends),
    killed          = broken(killed),
    breaks          = Case([4]*8, cbs=lambda: Callback(after_loss=lambda cb: had_enough() if cb.training and rank()==1
                                                       and cb.micro.i==5 else None)),   # in the middle of a window
)

def result(learn):
    """What is compared. `values` are left out, since a `DistributedDL` validates on other batches, and so are counts
    of micro-batches"""
    but = 'buffers','iters','final_record','values','train_iter'
    return dict({k:v for k,v in snapshot(learn).items() if k not in but}, n_steps=len(learn.spy.steps),
                seen=getattr(learn, 'seen', None),
                stats={k.removeprefix('module.'):o for k,o in learn.model.named_buffers()})

class OverHost(dist.ProcessGroup):
    "The messages of a device that PyTorch does not know: copied to the host, they go through gloo"
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    def getBackendName(self): return 'over_host'
    def send(self, name, *args, **kwargs):
        here = [o for o in tree_flatten(args)[0] if isinstance(o, Tensor)]
        host = {id(o):o.cpu() for o in here}
        getattr(self.gloo, name)(*tree_map(lambda o: host.get(id(o), o), args), **kwargs).wait()
        for o in here: o.copy_(host[id(o)])
        done = Future()
        done.set_result(here)
        return _create_work_from_future(done)
for o in 'allreduce','allgather','broadcast','barrier': setattr(OverHost, o, partialmethod(OverHost.send, o))

def on_devices(rank):
    "Each process trains on a simulated device of its own"
    sys.path.append(str(Path(__file__).parent/'simulated'))
    import fakegpu
    fakegpu.set_device(rank)
    here.device = torch.device('fakegpu', rank)
    dist.Backend.register_backend('over_host', OverHost, devices=['fakegpu'])
    return fakegpu

def main(rank, world, folder, *names):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR='127.0.0.1',
                      MASTER_PORT='0')
    os.environ['SEVERAL_PATH'] = f'{folder}/{rank}'
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell ignores it in what runs in the background
    on_cpu = 'SEVERAL_DEVICES' not in os.environ
    if not on_cpu: simulated = on_devices(rank)
    # a file: no port that may be taken
    dist.init_process_group('gloo' if on_cpu else 'cpu:gloo,fakegpu:over_host', f'file://{folder}/store',
                            timedelta(seconds=300), world, rank)
    for nm in names:
        print(rank, nm, flush=True)
        torch.save(result(cases[nm].several(rank, world)), f'{folder}/{nm}.{rank}')
    dist.barrier()   # or one may end while another still listens to it
    assert on_cpu or simulated.stats(rank)['total'] and not simulated.stats(1-rank)['total'] and not simulated.races()
    sys.stdout.flush()
    os._exit(0)   # all is saved; now and then, threads of gloo abort a process that ends

if __name__=='__main__': main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
