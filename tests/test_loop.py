"The loop over windows: what is counted, tails, what is left out or thrown away, and what stays in long runs"
import gc,pytest
from contextlib import nullcontext
from nets import *
from fastai_accum.all import *

def of_windows(windows):
    "Loaders whose batches are these samples"
    return of_batches([(features(76)[w],classes(76)[w]) for w in windows], make_dls(76, 16).valid)
def of_sizes(*sizes):
    ends = np.cumsum(sizes)
    return of_windows([range(end-n, end) for n,end in zip(sizes, ends)])

def test_samples_are_counted_as_they_arrive():
    "Batches of 4, 32 and 24 samples are two windows of 30, not three: `n_iter` says three, and the position is right"
    at = []
    def step(cb): at.append(cb.pct_train); assert cb.n_iter==3
    cbs = [AccumulateStep(n_samples=30, drop_last=False), Callback(after_step=step)]
    a,b = make_learner(of_sizes(4, 32, 24), cbs=cbs, opt_func=SGD),make_learner(of_sizes(36, 24), opt_func=SGD)
    for l in (a,b): l.fit(1)
    close(*([snapshot(l)[k] for k in ('params','step.grads','losses')] for l in (a,b)))
    assert a.accumulate_step.counts.sizes==[36,24]
    close([*at, a.pct_train], [0,2/3,1])

@each(case=[('after_backward',CancelBatchException,5), ('after_backward',CancelTrainException,5),
            ('after_backward',KeyboardInterrupt,5), ('before_step',CancelBatchException,7)])
def test_a_window_that_is_thrown_away_clears_all(case):
    "Also the gradients of what the optimizer does not hold: a frozen part of the model, and the loss's own parameters"
    event,exc,at = case
    learn = make_learner(make_dls(64, 8), loss_func=scaled(), splitter=lambda m: [params(m[0])],
                         cbs=[AccumulateStep(4), raising(exc, event, lambda cb: cb.micro.i==at)])
    with pytest.raises(exc) if exc is KeyboardInterrupt else nullcontext(): learn.fit(1, cbs=NoValid())
    assert learn.micro.i==at   # the rest of the window is drawn, not run
    for p in *learn.model.parameters(),learn.loss_func.s: assert p.grad is None or not p.grad.any()

@each(cb=[AccumulateStep(4), AccumulateStep(4, drop_last=True), MicroBatch(3)])
def test_progress_moves_at_each_micro_batch(cb, monkeypatch):
    "The bar counts the batches of the loader; those of a dropped tail are not run"
    import fastai.callback.progress as fap
    seen = {}
    class Bar(fap.progress_bar):
        def update(self, val): seen[val,self.total] = 1; super().update(val)
    monkeypatch.setattr(fap, 'progress_bar', Bar)
    make_learner(make_dls(76, 8), cbs=[NoValid(),cb]).add_cb(ProgressCallback()).fit(1)
    assert list(seen)==[(i,10) for i in range(9 if cb.drop_last else 11)]

@each(7, which=[{1}, {3}, {9}, {1,3,4,5}, {4,5,6,7}, {8,9}], order=[-1000,0,1000],
       event=['before_batch','after_pred','after_loss','before_backward'])
def test_cancelled_micro_batches(which, event, order):
    "What is cancelled before its backward pass adds nothing, and its window steps, also if it was the boundary"
    cb = raising(CancelBatchException, event, lambda cb: cb.micro.i in which, order)
    windows = [[j for i in range(k, min(k+4,10)) if i not in which for j in range(i*8, min(i*8+8,76))] for k in (0,4,8)]
    a = make_learner(make_dls(76, 8, shuffle=False), cbs=[cb, AccumulateStep(4)])
    b = make_learner(of_windows(filter(None, windows)))
    for l in (a,b): l.fit(1)
    close(weights(a), weights(b))
    n,left = a.accumulate_step.counts,sum(map(len, windows))
    assert (n.n_steps,n.n_stepped,n.n_thrown)==(len(b.spy.steps),left,76-left)

def test_one_scale_a_window():
    "Losses are divided by the samples of their window, a tail, too: a backward pass that clamps is the large batch's"
    seen = []
    note = Callback(after_backward=lambda cb: seen.append(cb.accumulate_step.window.scale))
    make_learner(make_dls(76, 8), cbs=[AccumulateStep(4), note]).fit(2)
    assert seen==([32]*8+[12]*2)*2
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6,5), Made(lambda m, x: Clamped.apply(x)), nn.Linear(5,3)).double()
    # a window of 30 samples ends after a batch, too
    for make in (lambda: AccumulateStep(4),lambda: AccumulateStep(n_samples=30),lambda: MicroBatch(8)):
        same(make, bs=32 if isinstance(make(), MicroBatch) else 8, model=model)

class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g): return g.clamp(-.01, .01)

# A window of one micro-batch is plain fastai to every callback: batches differ in size here, and classes are weighted

class Grads(Callback):
    "Sees the gradients of a loss with a penalty, whose backward pass is its own, and clips them"
    def before_fit(self): self.seen = []
    def before_backward(self): (.1*sum(p.pow(2).sum() for p in self.model.parameters())).backward()
    def after_backward(self):
        self.seen += [self.learn.loss_grad.item(), *(p.grad.clone() for p in self.model.parameters())]
        nn.utils.clip_grad_norm_(self.model.parameters(), .1)

one_micro = dict(one_step=lambda: AccumulateStep(1), by_samples=lambda: AccumulateStep(n_samples=12),
                 uncut=lambda: MicroBatch(100), coupled=lambda: MicroBatch(5, coupled=True),
                 exact=lambda: MicroBatch(5, exact=True))

@each(way=one_micro)
@pytest.mark.filterwarnings('ignore:MicroBatch.*no batch of the training')
def test_one_micro_batch_is_plain(way):
    loss = nn.CrossEntropyLoss(weight=tensor([1.,5.,.2]).double())
    a,b = same(one_micro[way], bs=12, large=12, n=32, also=Grads, loss_func=loss)
    close(a.grads.seen, b.grads.seen)

# A fit that makes no step says so once

def skip(event, exc, n=4): return raising(exc, event, lambda cb: (cb.iter+1)%n)   # but every `n`th batch

@each(cb=[partial(AccumulateStep, 4), partial(AccumulateStep, n_samples=32), partial(MicroBatch, 4)],
      at=[('before_step',CancelBatchException), ('before_step',CancelStepException),
          ('after_backward',CancelBatchException), ('before_batch',CancelBatchException)])
def test_all_windows_are_cancelled(cb, at):
    def warned(n, size, acc):
        with warnings.catch_warnings(record=True, action='always') as ws:
            make_learner(make_dls(size, 8), cbs=[acc, skip(*at)]).fit(n)
        return [str(o.message) for o in ws if 'were cancelled' in str(o.message)]
    said, = warned(3, 24, cb())
    assert cb.func.__name__ in said and 'no steps in ' in said
    if at[1] is not CancelStepException: return
    for n in 1,2:   # the recipe of forums beside ours, where every fourth window steps: said once, in the first windows
        said, = warned(n, 128, AccumulateStep(2))
        assert '2 steps in 8 windows' in said
    with warnings.catch_warnings(action='error', category=UserWarning):
        # half of them is fine
        make_learner(make_dls(64, 8), cbs=[AccumulateStep(2), skip('before_step', CancelStepException, 2)]).fit(1)

@each(way=[(lambda: AccumulateStep(4), 8), (lambda: MicroBatch(8), 32), (lambda: MicroBatch(8, coupled=True), 32)])
def test_a_loop_of_ones_own(way):
    "Only `fit` knows windows: each call of `learn.one_batch` is a step with its batch, as without our callbacks"
    cb,bs = way
    def run(cbs):
        learn = make_learner(make_dls(64, bs, shuffle=False), cbs=cbs)
        learn.remove_cbs([learn.recorder,learn.micro])
        learn.create_opt()
        learn.spy.before_fit()
        learn.model.train()
        learn.training,learn.train_iter,learn.pct_train,learn.n_iter,learn.n_epoch = True,0,0.,64//bs,1
        for i,b in enumerate(learn.dls.train): learn.one_batch(i, b)
        is_clean(learn)
        return learn.spy.steps,weights(learn)
    ours,plain = run(cb()),run(None)
    close(ours, plain, 0)
    assert len(ours[0])==64//bs

class Rows(nn.Module):
    "A loss with centers, as a method of a module: the learner has `loss_func=rows.loss`"
    def __init__(self): super().__init__(); self.c = nn.Parameter(features(3, 3, 7))
    def loss(self, p, y): return F.cross_entropy(p, y)+.3*(p-self.c[y]).pow(2).mean()

ways = dict(n_step=lambda: AccumulateStep(4), n_samples=lambda: AccumulateStep(n_samples=32), cut=lambda: MicroBatch(8),
            coupled=lambda: MicroBatch(8, coupled=True), both=lambda: [AccumulateStep(2), MicroBatch(8)],
            weight=lambda: AccumulateStep(4, weight=lambda p, y: len(y)))

@each(12, used=['loss','tensor','penalty','some','method','hook'], way=ways, before=[None,.5])
def test_parameters_that_nobody_lists(used, way, before):
    "Centers in a callback, or in a module whose method is the loss: as with the large batch, in a short tail, too"
    loss = (lambda: Rows().loss) if used=='method' else lambda: nn.CrossEntropyLoss()
    def run(bs, *cbs):
        cb = Elsewhere(used, before)
        learn = make_learner(make_dls(76, bs, shuffle=False), loss_func=loss(), cbs=[cb, *cbs])
        learn.fit(2)
        return learn,cb
    bs = dict(cut=32, coupled=32, both=16).get(way, 8)
    (a,b),(large,c) = run(bs, *L(ways[way]())),run(32)
    assert_same(a, large)
    close([b.c.detach(), *b.grads], [c.c.detach(), *c.grads])

def test_cancelled_windows_leave_parameters_elsewhere():
    "Nothing of a window that is left out, and what they had before it stays for the next step"
    def run(bs, at, event, *cbs):
        def fill(cb):
            if cb.training and cb.micro.i==at: cb.elsewhere.c.grad = torch.ones(3, 3).double()
        leaves = raising(CancelBatchException, event, lambda cb: cb.micro.i==at)
        learn = make_learner(make_dls(64, bs, shuffle=False),
                             cbs=[Elsewhere('loss'), Callback(before_batch=fill), leaves, *cbs])
        learn.fit(2)
        return learn
    a,large = run(8, 4, 'after_backward', AccumulateStep(4)),run(32, 1, 'after_loss')
    for o in weights,lambda learn: learn.elsewhere.grads: close(o(a), o(large))
    assert len(a.elsewhere.grads)==2

class Iterates(Learner):
    "A training loop of its own: `one_batch`, a part of it, or nothing of fastai's; or only the step is its own"
    how = 'batch'
    def _do_epoch_train(self):
        if self.how=='step': return super()._do_epoch_train()
        self.dl = self.dls.train
        self._with_events(self.mine, 'train', CancelTrainException)
    def mine(self):
        self.n_iter = len(self.dl)
        if self.how=='all': self.all_batches()
        for i,b in enumerate(self.dl if self.how!='all' else ()):
            if self.how=='batch': self.one_batch(i, b)
            else: self._split(b)
            if self.how=='part': self._do_one_batch()
            if self.how=='none': self.backward_alone()
    def backward_alone(self): self.loss_func(self.model(*self.xb), *self.yb).backward()
    def one_batch(self, i, b):
        if self.how!='step' or not self.training: return super().one_batch(i, b)
        self._split(b)
        self.backward_alone()
        self.opt.step(); self.opt.zero_grad()

@each(way=dict(n_step=0, cut=0), how=['batch','part','none','all','step'])
def test_a_training_loop_of_its_own(way, how):
    "It is an error or a warning that names us, unless it calls `all_batches` and does not step by itself"
    learn = make_learner(make_dls(64, 16 if way=='cut' else 8, shuffle=False), cbs=ways[way]())
    learn.__class__,learn.how = Iterates,how
    says = '(AccumulateStep|MicroBatch).*'+('steps by itself' if how=='step' else 'do not come through `all_batches`')
    seen = pytest.warns(UserWarning, match=says) if how=='none' else pytest.raises(RuntimeError, match=says)
    with nullcontext() if how=='all' else seen: learn.fit(1)
    if how=='step': is_clean(learn)
    assert how!='all' or len(learn.spy.steps)==(4 if way=='cut' else 2)

class Record:
    def __init__(self, x, y, **other): vars(self).update(x=x, y=y, **other)

class OfRecords(Learner):
    "Takes batches apart itself, of any kind, and draws a number while it does"
    def _split(self, b):
        if isinstance(b, Record): b = vars(b)
        if isinstance(b, list) and isinstance(b[0], dict): b = {k:torch.stack([o[k] for o in b]) for k in 'xy'}
        if not isinstance(b, dict): b[1].div_(2)   # in place
        self.xb,self.yb = ((b['x'],),(b.pop('y'),)) if isinstance(b, dict) else ((b[1],),(b[0],))
        if self.noisy: self.xb = (self.xb[0]+torch.randn(1).double(),)

kinds = dict(dict=lambda x, y: dict(x=x, y=y, names=list(map(str, y))), record=Record, swapped=lambda x, y: (y, x),
             listed=lambda x, y: [y,x], each=lambda x, y: [dict(x=a, y=b) for a,b in zip(x, y)],
             odd=lambda x, y: dict(x=x, y=y, boxes=torch.zeros(2*len(y)+1, 4)))
def split_records(b, bs):
    n = len(b.x if isinstance(b, Record) else b['x'])
    def part(i): return {k:v[i:i+bs] if len(v)==n else v for k,v in (vars(b) if isinstance(b, Record) else b).items()}
    return [Record(**part(i)) if isinstance(b, Record) else part(i) for i in range(0, n, bs)]
splits = dict(split=lambda: MicroBatch(8, split=split_records), whole=lambda: AccumulateStep(1))

@each(kind=kinds, way=[*ways,'split','whole'])
def test_batches_that_the_learner_takes_apart(kind, way):
    "Dictionaries, objects and other orders are counted; what cannot be cut asks for `split`"
    def run(bs, *cbs):
        data = list(zip(features(76), classes(76)))
        def batch(os): return kinds[kind](torch.stack([o[0] for o in os]), torch.stack([o[1] for o in os]))
        dls = DataLoaders(*[DataLoader(data, bs=bs, create_batch=batch) for _ in range(2)])
        learn = make_learner(dls, cbs=[NoValid(), *cbs])
        learn.__class__,learn.noisy = OfRecords,way=='whole'
        torch.manual_seed(1)
        learn.fit(2)
        return learn
    if way=='split' and kind in ('swapped','listed','each'): return
    bs = dict(cut=32, coupled=32, both=16, split=32, whole=32).get(way, 8)
    cbs = L({**ways, **splits}[way]())
    if kind in ('record','odd') and way in ('cut','both'):
        with pytest.raises(ValueError, match='MicroBatch: the batch cannot be cut: .*pass split='): run(bs, *cbs)
    else: assert_same(run(bs, *cbs), run(32))

# ---- long runs

def rss():
    "Resident memory of this process in MiB"
    gc.collect()
    return int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')/2**20

class Watch(EachMicro):
    "Memory each 500 micro-batches, and the calls of Python in the hundred before"
    order = Recorder.order-1
    def before_fit(self): self.n,self.mem,self.calls = 0,[],[]
    def count(self, frame, event, arg): self.calls[-1] += event=='call'
    def after_batch(self):
        if not self.training: return
        self.n += 1
        if self.n%500==400: self.calls.append(0); sys.setprofile(self.count)
        if self.n%500==0: sys.setprofile(None); self.mem.append(rss())
    def after_fit(self): sys.setprofile(None)

@pytest.mark.skipif(not Path('/proc/self/statm').exists(),
                    reason='reads the memory of the process from /proc, which only Linux has')
def test_soak():
    """Six thousand micro-batches (`make sweep`: a hundred thousand): no memory that stays, and no work that grows;
    without `Recorder`, whose lists grow by one a step"""
    watch,n_epoch = Watch(),100 if SWEEP else 6
    learn = make_learner(make_dls(1000*8-3, 8, skip=(5,77)), cbs=[watch,AccumulateStep(n_samples=30, drop_last=True)])
    learn.remove_cbs([Spy,Recorder])
    learn.fit(n_epoch)
    first,last = (sorted(o)[3] for o in (watch.calls[:6], watch.calls[-7:-1]))   # an epoch may end among them
    grown = watch.mem[-1]-watch.mem[0]
    print(f'{watch.n} micro-batches; {grown:+.2f} MiB from the first 500 to the end; calls × {last/first:.3f}')
    assert watch.n>=n_epoch*990 and grown<1 and last/first<1.05
    n = learn.accumulate_step.counts
    assert n.n_samples==n.n_stepped+n.n_thrown
