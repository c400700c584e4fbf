"What a trial sets back, seen by `noise_scale` and by a block of the user's own: everything, bit for bit"
import queue,threading,tracemalloc
from collections import deque
import pytest
from fastai.text.data import LMDataLoader
from harness import *
import fastai_accum.all   # the methods of learners
from fastai_accum.know.unchanged import learner_state,unchanged

few = partial(Learner.noise_scale, n_step=2, num_it=6, show_plot=False)   # of 12 batches

class Plain:
    "A plain object that anneals, counts and draws"
    def __init__(self):
        self.t,self.seen,self.by,self.rng,self.old = 1.,deque(maxlen=3),{'n':np.zeros(1)},random.Random(0),torch.ones(2)
        self.np,self.inner,self.me = np.random.default_rng(0),SimpleNamespace(n=0),self
    def next(self):
        self.t *= .97; self.seen.append(self.t); self.by['n'] += 1; self.by[len(self.by)] = 1; self.inner.n += 1
        self.old.mul_(.9)
        return self.t*(1+.1*self.rng.random()+.1*self.np.random())*self.old.mean().item()

class Net(nn.Module):
    "Draws, has a buffer and an attribute, and objects of a class of its own, one in a list"
    def __init__(self):
        super().__init__(); torch.manual_seed(0); self.body,self.drop = small_model(),nn.Dropout(.2)
        self.register_buffer('b', torch.ones(3).double()); self.calls,self.o,self.os = 0,Plain(),[Plain()]
    def forward(self, x):
        self.calls += 1
        if self.training: self.b.mul_(1.01)
        return self.body(self.drop(x))*self.b*self.o.next()*self.os[0].next()*(1+self.calls/100)

class Stop(Callback):
    "Raises an error while `armed`, and changes what it holds"
    armed,held = None,None
    def before_fit(self): self.held = self.held or Plain()
    def after_backward(self):
        self.held.next()
        if self.armed and self.micro.i==5: raise self.armed('now')

def branch(learn):
    with unchanged(learn): learn.freeze(); learn.unfreeze(); learn.fit(1, .1, cbs=AccumulateStep(2))

@pytest.mark.parametrize('opt', [Adam, partial(OptimWrapper, opt=torch.optim.AdamW)], ids=['fastai','torch'])
@pytest.mark.parametrize('stop', [None,KeyboardInterrupt,ValueError])
@pytest.mark.parametrize('act', [few,branch], ids=['noise_scale','branch'])
def test_the_next_fit_is_the_same(act, stop, opt):
    "Weights, buffers, objects, generators, loaders, optimizer, recorder: bit for bit"
    a,b = (make_learner(make_dls(96, 8), Net(), cbs=[AccumulateStep(3), Stop()], opt_func=opt, splitter=trainable_params,
                        metrics=accuracy) for _ in range(2))
    for o in (a,b): random.seed(0); torch.manual_seed(1); o.fit(1)
    was = random.getstate(),torch.get_rng_state()
    before = [p.data_ptr() for p in a.model.parameters()]
    a.stop.armed = stop
    if stop:
        with pytest.raises(stop): act(a)
    else: act(a)
    a.stop.armed = None
    assert [p.data_ptr() for p in a.model.parameters()]==before and not a.model.b.ne(b.model.b).any()
    assert random.getstate()==was[0] and torch.equal(torch.get_rng_state(), was[1])
    for o in (a,b): random.setstate(was[0]); torch.set_rng_state(was[1]); o.fit(1)
    assert_same(a, b, 0)
    assert a.stop.held.t==b.stop.held.t

class Images:
    "A dataset in memory, with a table and a generator"
    def __init__(self, n=5000):
        self.x,self.y = np.zeros((n,50)),torch.zeros(n,50)
        self.df,self.items,self.rng = pd.DataFrame(self.x),[np.zeros(50) for _ in range(n)],np.random.default_rng(0)
    def __len__(self): return 96
    def __getitem__(self, i): self.rng.random(); return features(96)[i],classes(96)[i]

@pytest.mark.parametrize('part', [noop, lambda ds: torch.utils.data.Subset(ds, range(96)),
                                  lambda ds: torch.utils.data.ConcatDataset([ds])], ids=['itself','subset','joined'])
def test_data_is_not_copied(part):
    "8 MB, also if the model holds them; the generator of an augmentation is set back"
    ds = Images()
    dl = DataLoader(part(ds), bs=8)
    learn = make_learner(DataLoaders(dl, dl))
    learn.model.ds = ds
    tracemalloc.start()
    was = learner_state(learn)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size<5e5 and not was.arrays and not any(t is ds.y for t,*_ in was.tensors), size
    few(learn)
    assert len(ds.items)==5000 and ds.rng.random()==np.random.default_rng(0).random()

class Orders(torch.utils.data.Sampler):
    "Shuffles an array, or a tensor, in place"
    def __init__(self, idxs): self.idxs = idxs
    def __len__(self): return len(self.idxs)
    def __iter__(self): np.random.shuffle(np.asarray(self.idxs)); return iter(self.idxs.tolist())

@pytest.mark.parametrize('idxs', [np.arange(96),torch.arange(96)], ids=['array','tensor'])
def test_the_order_of_a_sampler(idxs):
    dl = torch.utils.data.DataLoader(Items(features(96), classes(96)), batch_size=8, sampler=Orders(idxs))
    learn,was = make_learner(DataLoaders(dl, dl)),idxs.tolist()
    few(learn); learn.check_accumulation()
    assert idxs.tolist()==was

def test_the_order_of_texts():
    dl = LMDataLoader([torch.randint(20, (40,)) for _ in range(30)], bs=4, seq_len=5, shuffle=True)
    was = list(dl.items.idxs)
    lm = nn.Sequential(nn.Embedding(20,4), nn.Linear(4,20), nn.Flatten(0, 1))
    learn = Learner(DataLoaders(dl, dl), lm, loss_func=lambda p, y: F.cross_entropy(p, y.flatten()))
    few(learn.remove_cb(ProgressCallback))
    assert list(dl.items.idxs)==was

def test_a_scheduler_of_pytorch():
    class Scheduled(Callback):
        def before_fit(self):
            if not hasattr(self, 'sched'): self.sched = torch.optim.lr_scheduler.StepLR(self.opt.opt, 2)
        def after_batch(self): self.sched.step()
    learn = make_learner(make_dls(96, 8), cbs=Scheduled(), opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
    learn.fit(1)
    def now(): return str((learn.scheduled.sched.state_dict(), learn.opt.opt.state_dict()))
    before = now()
    branch(learn)
    assert now()==before

def test_what_lives_is_left_alone():
    "A queue that a thread reads is not set back"
    q,got = queue.Queue(),[]
    class Logs(Callback):
        def __init__(self):
            self.q,self.thread = q,threading.Thread(target=lambda: [got.append(o) for o in iter(q.get, None)])
            self.thread.start()
        def after_batch(self): self.q.put(self.iter)
    learn = make_learner(make_dls(96, 8), cbs=Logs())
    try: few(learn)
    finally: q.put(None); learn.logs.thread.join(5)
    assert got==list(range(6)) and q.empty()
