"""What several processes train, and what one process trains on the same samples: started by `test_processes`, once for
each number of processes.

    python several.py RANK WORLD FOLDER CASE..."""
import os,signal,sys
from contextlib import nullcontext
from harness import *
from fastai.distributed import *
from fastai_accum.patch import *
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
    """The samples of each micro-batch, for each process. `sizes` is one list for all processes, or a list for each
    process"""
    sizes = sizes if is_listy(sizes[0]) else [sizes]*world
    res,i = [[] for _ in range(world)],0
    for k in range(max(map(len, sizes))):
        for r in range(world):
            if k<len(sizes[r]): res[r].append(list(range(i, i+sizes[r][k]))); i += sizes[r][k]
    return res

def placed(o): return o.to(here.device) if here.device else o   # where this process trains
def batches(idxs, y): return [(placed(features(N)[i]), placed(y[i])) for i in idxs]

def train(dls, model, cbs=None, loss_func=None, fit=None, opt_func=Adam):
    learn = make_learner(dls, model, loss_func=loss_func, opt_func=opt_func, splitter=trainable_params, cbs=cbs)
    (fit or (lambda l: l.fit_one_cycle(2, .02)))(learn)
    return learn

def no_batch(cb): raise CancelBatchException
def leave_out_first(cb):
    if cb.training and cb.micro.i==0: raise CancelBatchException

class Case:
    "Micro-batches of each process, and how they are trained on"
    def __init__(self, sizes, n_step=4, y=None, loss_func=None, cbs=None, model=small_model, fit=None, ddp=None,
                 acc=None, left_out=(), leave=None, but=()):
        store_attr()
        self.y = classes(N) if y is None else y
    def dls(self, idxs):
        return DataLoaders(DataLoader(batches(idxs, self.y), bs=None),
                           DataLoader(batches([list(range(16))], self.y), bs=None), device=here.device)
    def dropper(self, rank):
        "Leaves out the micro-batches that the case names, in the way that it names"
        event,f = self.leave or ('after_loss', no_batch)
        return Callback(**{event: lambda cb: f(cb) if cb.training and (rank,cb.micro.i) in self.left_out else None})
    def several(self, rank, world):
        "What process `rank` of `world` trains"
        cbs = [AccumulateStep(**(self.acc or dict(n_step=self.n_step))), self.dropper(rank),
               *L(self.cbs and self.cbs())]
        learn = train(self.dls(cut(world, self.sizes)[rank]), DDP(placed(self.model()), **(self.ddp or {})), cbs,
                      self.loss_func, self.fit)
        assert learn.model.require_backward_grad_sync and 'forward' not in vars(learn.model), 'something is left behind'
        return learn
    def windows(self, world):
        "The samples of each window of all processes together"
        cuts,n = cut(world, self.sizes),(self.acc or {}).get('n_step', self.n_step)
        kept = [[m if (r,j) not in self.left_out else [] for j,m in enumerate(c)] for r,c in enumerate(cuts)]
        at = lambda o, k: [i for c in o for m in c[k:k+1] for i in m]   # samples of the `k`th micro-batches
        res = [[]]
        for k in range(max(map(len, cuts))):
            res[-1] += at(kept, k)
            if k%n==n-1: res.append([])
        if (self.acc or {}).get('drop_last'): res = res[:-1]
        return [w for w in res if w]
    def alone(self, world):
        "What one process trains on the large batches"
        return train(self.dls(self.windows(world)), self.model(), self.cbs and self.cbs(), self.loss_func, self.fit)

class Two(nn.Module):
    "A branch that is used only where the first feature of the first sample is positive"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b = nn.Linear(6,3).double(),nn.Linear(6,3).double()
    def forward(self, x): return self.a(x)+self.b(x)*(x[:,:1]>.5).double() if (x[:,0]>.5).any() else self.a(x)

class Buffered(nn.Module):
    "A model with a buffer, which the processes exchange in the first forward pass after a step"
    def __init__(self): super().__init__(); self.body = small_model(); self.register_buffer('b', torch.ones(3).double())
    def forward(self, x): return self.body(x)*self.b

class ValidatesEarly(Callback):
    "Validates before the training loop, and puts the learner back"
    def before_train(self):
        dl = self.learn.dl
        self.learn.validate()
        self.learn.dl,self.learn.training = dl,True
        self.model.train()

def without_recorder(learn):
    rec = learn.recorder
    learn.remove_cb(Recorder)
    learn.fit(2, .02)
    learn.add_cb(rec)
    for k in ('lrs','losses','values','iters'): setattr(rec, k, [])
    learn.smooth_loss = learn.final_record = None

class Never(Two):
    "A branch that is never used"
    def forward(self, x): return self.a(x)

def cut_unequally(learn):
    "A fit that is cancelled when process 1 has run the model and process 0 has not"
    def stop(cb):
        if cb.training and cb.micro.i==1: raise CancelTrainException
    if isinstance(learn.model, DDP):
        cbs = [Callback(before_batch=stop)]
        if rank_distrib()==0: cbs.append(Callback(before_batch=leave_out_first))
        learn.fit(1, .02, cbs=cbs)
    learn.spy.steps = []
    learn.fit(1, .02)

def with_train_metrics(learn):
    learn.recorder.train_metrics,learn.metrics = True,accuracy
    learn.fit(1, .02)

def ignored(*which): y = classes(N); y[[i for w in which for i in w]] = -100; return y
def of_class_0(*which): y = classes(N).clamp(min=1); y[[i for w in which for i in w]] = 0; return y
def once(learn): learn.fit_one_cycle(2, .02)
def find(learn, **kwargs):
    learn.path = Path(os.environ.get('SEVERAL_PATH', '.'))
    learn.lr_find(show_plot=False, suggest_funcs=None, **{**dict(num_it=12, stop_div=False), **kwargs})
    learn.fit(1, .02)

cases = dict(
    tail          = Case([4]*6),
    one_window    = Case([4]*2),
    events_weighed= Case([[1,7,2,5,3], [6,1,4,2,2], [3,3,1,1,5]], cbs=probes, loss_func=nn.CrossEntropyLoss(weight=W)),
    early_valid   = Case([4]*6, cbs=ValidatesEarly),
    no_recorder   = Case([4]*6, fit=without_recorder),
    no_accum      = Case([4]*3, n_step=1),
    uneven        = Case([[1,7,2,5,3], [6,1,4,2,2], [3,3,1,1,5]]),
    weighted      = Case([4]*6, loss_func=nn.CrossEntropyLoss(weight=W)),
    one_is_empty  = Case([4]*4, y=ignored(range(0,4), range(12,16), range(8,12))),
    dropped_last  = Case([4]*8, left_out={(0,3),(1,7)}),
    dropped_all   = Case([4]*8, left_out={(1,0),(1,1),(1,2),(1,3)}),
    kept_sum      = Case([4]*6, loss_func=nn.CrossEntropyLoss(reduction='sum'), acc=dict(n_step=4, average=False)),
    unused_drop   = Case([4]*8, model=Two, ddp=dict(find_unused_parameters=True), left_out={(0,3),(1,7)}),
    static        = Case([4]*6, ddp=dict(static_graph=True)),
    short_epoch   = Case([2]*12, n_step=1, fit=lambda l: l.fit(2, .02), cbs=lambda: ShortEpochCallback(.4)),
    early_drop    = Case([4]*8, left_out={(0,3),(1,5)}, leave=('before_batch', no_batch)),
    buffers_drop  = Case([4]*8, model=Buffered, left_out={(0,3),(1,4),(1,5),(1,6),(1,7)}),
    unused_never  = Case([4]*8, model=Never, ddp=dict(find_unused_parameters=True), left_out={(1,k) for k in range(4)}),
    static_unused = Case([4]*6, ddp=dict(find_unused_parameters=True, static_graph=True)),
    cut_unequally = Case([4]*8, model=Buffered, fit=cut_unequally),
    rank_weighs_0 = Case([4]*4, loss_func=nn.CrossEntropyLoss(weight=tensor([0.,1.,3.]).double()),
                         y=of_class_0(range(4,8), range(12,16), range(20,24), range(28,32))),
    train_metrics = Case([4]*6, fit=with_train_metrics),
)

def cpu_broadcast(self, t, rank):
    "`DistributedDL._broadcast` without its `.cuda()`"
    t = LongTensor(t)
    dist.broadcast(t, rank)
    return t.tolist()

class InContext(Case):
    """fastai's `distrib_ctx`, which splits the samples of one loader over the processes. It repeats samples if their
    number cannot be divided evenly"""
    leave,but = None,()
    def __init__(self, bs, n=N, drop_last=False, n_step=4, fit=None, acc=None, patch=False, cbs=None,
                 torch_dl=False, left_out=()):
        store_attr()
        self.y,self.loss_func,self.model = classes(N),None,small_model
    def several(self, rank, world):
        DistributedDL._broadcast = cpu_broadcast
        cbs = [*([] if self.patch else [AccumulateStep(**(self.acc or dict(n_step=self.n_step)))]),
               *L(self.cbs and self.cbs())]
        dls = make_dls(self.n, self.bs, self.y[:self.n], self.drop_last, shuffle=False, x=features(N)[:self.n])
        if self.torch_dl:
            dls.loaders[0] = torch.utils.data.DataLoader(dls.train.dataset, self.bs, drop_last=self.drop_last)
        learn,loader = make_learner(dls, splitter=trainable_params, cbs=[*cbs, self.dropper(rank)]),dls.train
        with learn.distrib_ctx(cpu=True, sync_bn=False), accumulation(self.n_step) if self.patch else nullcontext():
            (self.fit or once)(learn)
        assert not isinstance(learn.model, DDP) and learn.dls.train is loader, 'the context has left something behind'
        return learn
    def windows(self, world):
        each,(bs,k) = -(-self.n//world),(self.bs,self.n_step)
        idxs = (list(range(self.n))*2)[:each*world]
        n = each//bs//k*k*bs if self.drop_last else each
        parts = [[i if (r,j//bs) not in self.left_out else None for j,i in enumerate(idxs[r*each:(r+1)*each])]
                 for r in range(world)]
        return [[i for p in parts for i in p[w:min(w+k*bs,n)] if i is not None] for w in range(0, n, k*bs)]

def grows(pct): return 1 if pct<.3 else 2 if pct<.6 else 3
class Scheduled(Case):
    "Windows on a schedule, against one process whose batches are those of all processes together"
    def __init__(self, *args, acc=None, **kwargs):
        super().__init__(*args, n_step=1, acc=acc or dict(n_step=grows), **kwargs)
    def alone(self, world):
        acc,self.acc = self.acc,None
        dls,self.acc = self.dls(self.windows(world)),acc
        return train(dls, self.model(), AccumulateStep(**acc), self.loss_func, self.fit)
cases.update(
    sched          = Scheduled([4]*8),
    sched_weighted = Scheduled([4]*8, loss_func=nn.CrossEntropyLoss(weight=W)),
    sched_drop     = Scheduled([4]*8, acc=dict(n_step=lambda pct: 3, drop_last=True)),
)

class Messages(EachMicro):
    "The bytes of each message that is sent for a micro-batch, and the gradients after its backward pass"
    order,run_valid = -2000,False
    def before_fit(self):
        self.learn.seen,self.sent = [],[]
        # goes through `all_reduce`, where it is counted
        if isinstance(self.model, DDP): self.model.register_comm_hook(None, allreduce_hook)
        self.old,dist.all_reduce = dist.all_reduce,self.all_reduce
    def all_reduce(self, t, *args, **kwargs):
        self.sent.append(t.nbytes)
        return self.old(t, *args, **kwargs)
    def after_backward(self): self.grads = [p.grad.clone() for p in self.model.parameters()]
    def after_batch(self):
        self.learn.seen.append((self.sent,self.grads))
        self.sent = []
    def after_fit(self): dist.all_reduce = self.old

cases['messages'] = Case([4]*8, cbs=Messages, fit=lambda l: l.fit(1, .02))
cases.update(
    ctx_tail      = InContext(4, n=90),
    ctx_odd       = InContext(4, n=89),
    ctx_drop_odd  = InContext(4, n=59, n_step=2, drop_last=True),
    ctx_patch     = InContext(4, n=90, patch=True),
    ctx_samples   = InContext(4, n=90, n_step=3, acc=dict(n_samples=20)),
    ctx_torch     = InContext(4, n=90, drop_last=True, torch_dl=True),
    ctx_drop_63   = InContext(4, n=63, n_step=2, drop_last=True),
    ctx_after     = InContext(4, n=90, fit=lambda l: (l.fit(1, .02), l.fit_one_cycle(1, .02))),
    ctx_scaler    = InContext(4, n=90, cbs=lambda: [OnCpu(init_scale=2.**10, growth_interval=2), GradientClip(.1)]),
)

class Full(nn.Module):
    "Runs out of memory in process 1, in the second epoch, when it sees more than two samples"
    n_full = 0   # in the class, since a second try begins with what the model held before
    def __init__(self): super().__init__(); self.body = Buffered(); self.n = 0
    def forward(self, x):
        self.n += 1
        if os.environ.get('RANK')=='1' and self.training and self.n>10 and len(x)>2:
            Full.n_full += 1
            raise RuntimeError('CUDA out of memory')
        return self.body(x)

class FullInValidation(Buffered):
    "Runs out of memory in validation, in process 1"
    def forward(self, x):
        if os.environ.get('RANK')=='1' and not self.training and len(x)>4: raise RuntimeError('CUDA out of memory')
        return super().forward(x)

class Cut(Case):
    "With `MicroBatch` in the runs of several processes, and without it in the run of one process"
    def alone(self, world):
        cbs,self.cbs = self.cbs,None
        learn = super().alone(world)
        self.cbs = cbs
        return learn
    def several(self, rank, world):
        learn = super().several(rank, world)
        if self.model is Full: assert Full.n_full or not int(os.environ['RANK']), 'memory has not run out'
        return learn

cases.update(
    cut          = Cut([[1,7,2,5,3], [6,1,4,2,2], [3,3,1,1,5]], cbs=lambda: MicroBatch(2)),
    cut_coupled  = Cut([[1,7,2,5,3], [6,1,4,2,2], [3,3,1,1,5]], cbs=lambda: MicroBatch(2, coupled=True)),
    auto         = Cut([4]*8, cbs=lambda: MicroBatch(), model=Full),
    auto_coupled = Cut([4]*8, cbs=lambda: MicroBatch(coupled=True), model=Full),
    auto_valid   = Cut([4]*8, cbs=lambda: MicroBatch(), model=FullInValidation),
)

def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6,8,bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(.2),
                         nn.Linear(8,3)).double()

class Exact(Case):
    "Each process's batch norm and dropout see its own whole batches, in slices or not"
    def several(self, rank, world):
        def one(*cbs):
            set_seed(rank)
            return train(self.dls(cut(world, self.sizes)[rank]), DDP(normed()), [AccumulateStep(2), *cbs])
        a,b = one(MicroBatch(3, exact=True)),one()
        assert_same(a, b)
        return super().several(rank, world)

cases.update(
    exact_uneven = Exact([[8,5,8], [4,7,4], [2,4,8]]),
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
    "Two batch norms, of which one is conditional, and one layer between them"
    def __init__(self, affine=True, tracked=True, momentum=.1, frozen=False):
        super().__init__()
        torch.manual_seed(0)
        kw = dict(affine=affine, track_running_stats=tracked, momentum=momentum)
        self.a,self.b,self.c = (nn.Linear(*o, bias=False) for o in ((6,8),(8,8),(8,3)))
        self.m,self.n = nn.BatchNorm1d(8, **kw),nn.BatchNorm1d(8, **kw)
        self.frozen,self.skips = frozen,False
        self.double()
    def train(self, mode=True):
        super().train(mode)
        if self.frozen: self.m.eval()
        return self
    def forward(self, x):
        x = self.b(self.m(self.a(x)).tanh())
        return self.c((x if self.skips else self.n(x)).tanh())

class Skips(Callback):
    "Leaves out a norm in every other batch"
    def before_batch(self): get_model(self.model).skips = bool(self.iter%2)

def rank(): return int(os.environ.get('RANK', 0))
def exact(*sizes): return lambda: [MicroBatch(sizes[rank()%len(sizes)], exact=True)]

def synced(model):
    "`model` with ordinary batch norm synchronised"
    for m in list(model.modules()):
        for k,o in m.named_children():
            if type(o) is nn.BatchNorm1d: setattr(m, k, nn.SyncBatchNorm.convert_sync_batchnorm(o))
    return model.train()

class Synced(Cut):
    "Batch norm over all processes and slices, against ordinary batch norm on the batches of all processes"
    def __init__(self, sizes, bs=(3,), n_step=1, cbs=None, model=Norms, also=None, **kwargs):
        self.also = also   # callbacks of the one process
        # fastai's optimizers mark the parameters of ordinary batch norm, and do not decay them
        super().__init__(sizes, n_step, cbs=cbs or exact(*bs), model=model, but=['opt'],
                         **{'fit': lambda l: l.fit_one_cycle(2, .02, wd=0.), **kwargs})
    def several(self, rank, world):
        on_cpus()
        plain = self.model
        self.model = lambda: synced(plain())
        try: learn = super().several(rank, world)
        finally: self.model = plain
        return self.with_stats(learn)
    def alone(self, world):
        cbs,self.cbs = self.cbs,self.also
        try: return self.with_stats(Case.alone(self, world))
        finally: self.cbs = cbs
    def with_stats(self, learn):
        learn.stats = {k.removeprefix('module.'):o for k,o in learn.model.named_buffers()}
        return learn

cases.update(
    synced         = Synced([24,24], bs=(12,20)),
    synced_uneven  = Synced([[9,5,8], [4,7,3], [6,2,5]], bs=(3,5)),
    synced_one     = Synced([[9,5,8], [4,1,3]], bs=(3,5)),   # a batch of one sample, in one process
    synced_weighed = Synced([[9,5,8], [4,7,3]], bs=(3,5), loss_func=nn.CrossEntropyLoss(weight=W)),
    synced_plain   = Synced([8]*4, model=partial(Norms, affine=False)),
    synced_untracked = Synced([8]*4, model=partial(Norms, tracked=False)),
    synced_cumulates = Synced([8]*4, model=partial(Norms, momentum=None)),
    synced_frozen  = Synced([8]*4, model=partial(Norms, frozen=True)),
    synced_skips   = Synced([8]*5, cbs=lambda: [Skips(), *exact(3, 5)()], also=Skips),
)

class At(nn.Module):
    "Calls `f` in the forward or in the backward pass of batch `i` of process 1"
    def __init__(self, f, i, backward): super().__init__(); store_attr(); self.n = 0
    def forward(self, x):
        if not self.training or rank()!=1 or self.n!=self.i: return x
        if self.backward: x.register_hook(lambda g: self.f())
        else: self.f()
        return x

def had_enough(): raise ValueError('process 1 has had enough')
def ctrl_c(): raise KeyboardInterrupt
def killed(): os.kill(os.getpid(), signal.SIGKILL)
def cancel(): raise CancelBatchException

class Breaks(Synced):
    "Process 1 breaks in batch `i`, in the model or at an event; the other one says so, and then both train"
    def __init__(self, f=had_enough, i=1, event='model', error=ValueError, says='process 1 has failed', **kwargs):
        super().__init__([8]*4, (3,5), **kwargs)
        self.f,self.i,self.event,self.error,self.says,self.bad = f,i,event,error,says,False
    def dls(self, idxs):
        dls = super().dls(idxs)
        plain = dls.train.create_item
        def create_item(i): return self.f() if i==self.i else plain(i)
        if self.bad and rank()==1 and self.event=='loader': dls.train.create_item = create_item
        return dls
    def breaks(self, rank, world):
        "Train as far as the error"
        def stop(cb): return self.f() if cb.training and rank==1 and cb.iter==self.i else None
        def norms():
            m = Norms()
            at = At(self.f, self.i, self.event=='backward')
            m.b = nn.Sequential(m.b, at)   # between two batch norms
            m.register_forward_pre_hook(lambda *_: setattr(at, 'n', m.i))
            return m
        in_model,plain = self.event in ('model','backward'),(self.model,self.cbs)
        class Counts(Callback):
            def before_batch(self): get_model(self.model).i = self.iter
        self.model,self.bad = norms if in_model else Norms,True
        breaks = [] if self.event=='loader' else [Counts()] if in_model else [Callback(**{self.event:stop})]
        self.cbs = lambda: [*plain[1](), *breaks]
        try: Synced.several(self, rank, world)
        finally: (self.model,self.cbs),self.bad = plain,False
    def several(self, rank, world):
        with pytest.raises((self.error,) if rank==1 else RuntimeError, match=None if rank==1 else self.says):
            self.breaks(rank, world)
        return super().several(rank, world)

cases.update(
    breaks_model    = Breaks(),
    breaks_at_first = Breaks(i=0),
    breaks_backward = Breaks(event='backward'),
    breaks_loss     = Breaks(event='after_loss'),
    breaks_batch    = Breaks(event='before_batch'),
    breaks_loader   = Breaks(event='loader'),
    breaks_ctrl_c   = Breaks(ctrl_c, error=KeyboardInterrupt),
    leaves_out      = Breaks(cancel, event='after_loss', error=RuntimeError, says='1 ends a window'),
    leaves_out_all  = Breaks(cancel, event='before_batch', error=RuntimeError, says='1 ends a window'),
)

class Refuses(Synced):
    "All processes refuse the callback `cb`, with the same error; then they train"
    def __init__(self, cb, says, error=RuntimeError, wrap=DDP, model=Norms, ignored=()):
        super().__init__([[8]*3, [12]*3, [4]*3], (3,5))
        self.bad,self.says,self.error,self.wrap,self.refused,self.ignored = cb,says,error,wrap,model,ignored
    def several(self, rank, world):
        on_cpus()
        model,dls = synced(self.refused()),self.dls(cut(world, self.sizes)[rank])
        if rank==1:
            for i in self.ignored: dls.train.dataset[i][1].fill_(-100)   # no targets
        with pytest.raises(self.error, match=self.says):
            train(dls, self.wrap(model), [AccumulateStep(1), *L(self.bad())])
        return super().several(rank, world)

alike = 'process 0 cuts a batch into 3 slices, but process 1 cuts a batch into 4 slices'
cases.update(
    refuses_plain   = Refuses(lambda: MicroBatch(3), alike),
    refuses_coupled = Refuses(lambda: MicroBatch(3, coupled=True), alike),
    refuses_auto    = Refuses(lambda: MicroBatch(exact=True), 'bs must be a number', ValueError),
    refuses_plain_auto = Refuses(MicroBatch, 'bs must be a number', ValueError),
    refuses_ignored = Refuses(exact(3,5), 'process 0 is back at batch norm 2 of a batch, but process 1 ends a window',
                              ignored=[1]),   # in process 1, the second batch has no target
    refuses_bare    = Refuses(lambda: MicroBatch(3, exact=True), 'in DistributedDataParallel', ValueError, noop),
)

class Sent(Callback):
    "Counts the messages of each batch until its step"
    run_valid = False
    def before_fit(self):
        self.now,self.learn.seen,self.plain = {},[],{k:getattr(dist, k) for k in ('all_gather','all_reduce')}
        for k,f in self.plain.items(): setattr(dist, k, partial(self.send, k, f))
    def send(self, k, f, *args, **kwargs): self.now[k] = self.now.get(k, 0)+1; return f(*args, **kwargs)
    def before_batch(self): self.now = {}
    def before_step(self): self.learn.seen.append(dict(self.now))
    def after_fit(self):
        for k,f in self.plain.items(): setattr(dist, k, f)
cases['synced_messages'] = Synced([12]*4, cbs=lambda: [Sent(), *exact(2, 6)()])

class Slices(Synced):
    "Plain slices see the slices of all processes, as if these were the micro-batches of one process"
    def windows(self, world):
        return [[i for c in cut(world, self.sizes) for i in c[k][j:j+4]] for k in range(4) for j in (0,4)]
cases.update(
    synced_slices  = Slices([8]*4, cbs=lambda: MicroBatch(4), also=lambda: AccumulateStep(2)),
    synced_accum   = Synced([[9,5,8], [4,7,3]], cbs=lambda: [], loss_func=nn.CrossEntropyLoss(weight=W)),
)

class Coupled(Slices):
    "The same with `coupled=True`, where the loss sees the whole batch and running statistics move once"
    def windows(self, world): return [a+b for a,b in chunked(super().windows(world), 2)]
cases['synced_coupled'] = Coupled([8]*4, cbs=lambda: MicroBatch(4, coupled=True),
                                  also=lambda: MicroBatch(8, coupled=True))

class Unused(Norms):
    "The loss does not use the output of one norm"
    def __init__(self): super().__init__(); self.o = nn.BatchNorm1d(8).double()
    def forward(self, x):
        x = self.m(self.a(x)).tanh()
        self.o(self.b(x))
        return self.c(self.n(self.b(x)))
cases['synced_unused'] = Synced([8]*4, (3,5), model=Unused)

class Halves(nn.BatchNorm1d):
    "In training, the statistics of each half of the batch"
    def forward(self, x):
        if not self.training: return super().forward(x)
        def norm(o): return F.batch_norm(o, None, None, self.weight, self.bias, True, eps=self.eps)
        return torch.cat([norm(o) for o in x.chunk(2)])
def grouped(*groups):
    "Norms that share their statistics with the processes of their group only; in one process, with half of the batch"
    groups = [dist.new_group(o) for o in groups] if dist.is_initialized() else []
    mine = first(groups, lambda o: o is not dist.GroupMember.NON_GROUP_MEMBER)
    norm = partial(nn.SyncBatchNorm, process_group=mine) if groups else Halves
    model = Norms(tracked=False)
    model.m = norm(8, track_running_stats=False).double()
    return model
cases['synced_groups'] = Synced([8]*2, (3,5), model=partial(grouped, [0,1], [2,3]))
cases['refuses_groups'] = Refuses(exact(3,5), 'process 2 is at batch norm', model=partial(grouped, [0,1], [2]))

def result(learn):
    """What is compared. `values` are left out, since a `DistributedDL` validates on other batches, and so are counts
    of micro-batches"""
    but = 'buffers','iters','final_record','values','train_iter'
    return dict({k:v for k,v in snapshot(learn).items() if k not in but}, n_steps=len(learn.spy.steps),
                seen=getattr(learn, 'seen', None), stats=getattr(learn, 'stats', None))

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
                            timedelta(seconds=30), world, rank)
    for nm in names:
        print(rank, nm, flush=True)
        torch.save(result(cases[nm].several(rank, world)), f'{folder}/{nm}.{rank}')
    dist.barrier()   # or one may end while another still listens to it
    assert on_cpu or simulated.stats(rank)['total'] and not simulated.stats(1-rank)['total'] and not simulated.races()
    sys.stdout.flush()
    os._exit(0)   # all is saved; now and then, threads of gloo abort a process that ends

class Refused(Case):
    "All processes raise the same error; then they train"
    def __init__(self, says, bad): super().__init__([4]*6); self.says,self.bad = says,bad
    def several(self, rank, world):
        with pytest.raises((RuntimeError,ValueError), match=self.says): self.bad.several(rank, world)
        return super().several(rank, world)

class Sharded(Case):
    "A model in `fully_shard`"
    def several(self, rank, world):
        model = fully_shard(self.model(), mesh=init_device_mesh('cpu', (world,)))
        return train(self.dls(cut(world, self.sizes)[rank]), model, AccumulateStep(self.n_step))

waits = 'lr_find waits for ever in several processes'
cases.update(
    recovers       = Refused('has no more batches', Case([[4]*9, [4]*4])),
    shards         = Refused('fully_shard', Sharded([4]*8)),
    lr_find        = Refused(waits, Case([4]*6, fit=find)),
    ctx_find       = Refused(waits, InContext(4, n=90, fit=find)),
    shorter_tail   = Case([[4]*8, [4]*6]),
    empty          = Case([[4]*4, []]),
    metrics_uneven = Case([[4]*5, [4]*4], fit=with_train_metrics),
)

def breaks(rank):
    "An error in one process, in the middle of a window"
    if rank==1: raise ValueError('process 1 has had enough')
cases['breaks'] = Case([4]*8, cbs=lambda: Callback(after_loss=lambda cb: breaks(int(os.environ['RANK'])) if cb.training
                                                   and cb.micro.i==5 else None))

class Killed(Breaks):
    "Process 1 is killed between two batch norms"
    def several(self, rank, world): return self.breaks(rank, world)
cases['killed'] = Killed(killed)

if __name__=='__main__': main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
