"""Callbacks that fastai ships beside `AccumulateStep`, and our own; loggers, trackers and hooks are in
`test_with_loggers`"""
from matrix import *
from fastai.callback.channelslast import *
from fastai_accum.microbatch import *

def resumed(learn):
    "`SkipToEpoch` after loading"
    learn.fit_one_cycle(2, .02, cbs=[SaveModelCallback(every_epoch=True, with_opt=True)])
    learn.load('model_0')
    learn.fit_one_cycle(2, .02, start_epoch=1)

class WeightAverage(Callback):
    "An exponential average of the weights, in `after_batch`"
    run_valid = False
    def before_fit(self): self.learn.got = deepcopy(self.model.state_dict())
    def after_batch(self):
        for k,v in self.model.state_dict().items(): self.learn.got[k].lerp_(v, .2)

def conv_model(norm=nn.Identity):
    return nn.Sequential(nn.Conv2d(3,4,3), norm(4), nn.Tanh(), nn.Conv2d(4,4,3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(4,3)).double()
def image_dls(n, bs, **kwargs): return make_dls(n, bs, x=features(n, 3*8*8).reshape(n,3,8,8), **kwargs)
images = dict(dls=image_dls, model=conv_model)

def to_last(cb): cb.learn.xb = tuple(o.contiguous(memory_format=torch.channels_last) for o in cb.xb)
def is_last(a, b): return a.model[0].weight.is_contiguous(memory_format=torch.channels_last)

def frozen_bn():
    model = conv_model(nn.BatchNorm2d)
    for p in model[1].parameters(): p.requires_grad_(False)
    model[1].running_mean.fill_(.1)
    return model

class Rnn(nn.Module):
    "Predictions, and the activations that `RNNRegularizer` asks for"
    def __init__(self):
        super().__init__()
        self.body,self.head,self.n_reset = nn.RNN(6, 5, batch_first=True).double(),nn.Linear(5, 3).double(),0
    def reset(self): self.n_reset += 1
    def forward(self, x):
        h = self.body(x)[0]
        return self.head(h[:,-1]),[h],[h*.9]
def sequence_dls(n, bs, **kwargs): return make_dls(n, bs, x=features(n, 6*4).reshape(n,4,6), **kwargs)
rnn = dict(dls=sequence_dls, model=Rnn, **one_group)

def draws(cls, **kw):
    "Loaders that draw with replacement or in part: the same draws for each run"
    def make(n, bs, drop_last):
        np.random.seed(0)
        items = list(zip(features(n), classes(n)))
        return DataLoaders(cls(dataset=items, bs=bs, drop_last=drop_last, **kw), DataLoader(items[:24], bs=16))
    return make
def of_pytorch(n, bs, drop_last):
    data = torch.utils.data.TensorDataset(features(n), classes(n))
    dl = torch.utils.data.DataLoader
    return DataLoaders(dl(data, bs, drop_last=drop_last), dl(data, 16))

def sliced(coupled): return [MicroBatch(8, coupled=coupled), AccumulateStep(2)]
fits = [dict(fit=f, **o) for o in tails for f in (lambda l: l.fit(2), once, lambda l: l.fit_flat_cos(2, .02),
                                                  lambda l: l.fit_sgdr(2, 1, .02))]
test_callbacks = alike(
    case('Training', '`fit`, `fit_one_cycle`, `fit_flat_cos`, `fit_sgdr`', *fits,
         note='The last window of an epoch is kept or dropped.'),
    case('Training', '`start_epoch`', fit=resumed, dls=partial(make_dls, shuffle=False),
         note='`SkipToEpoch`, after loading a model that was saved with its optimizer.'),
    case('Callbacks', 'GradientClip', *[dict(cbs=partial(GradientClip, .01, o)) for o in (1., 2., math.inf)],
         matters=True, note='It clips the gradient of the window, with each `norm_type`.'),
    case('Callbacks', 'a moving average of the weights', *tails, cbs=WeightAverage, check=lambda a,b: a.got,
         note='An exponential moving average in `after_batch`, at the default order.'),
    case('Callbacks', 'ChannelsLast', cbs=ChannelsLast, **images, check=is_last),
    case('Callbacks', 'BnFreeze', cbs=BnFreeze, dls=image_dls, model=frozen_bn, **one_group,
         note='Frozen batch norm does not look at the micro-batch.',
         check=lambda a,b: (a.model[1].running_mean==.1).all() and not a.model[1].training),
    case('Callbacks', 'ShortEpochCallback', *[dict(cbs=partial(ShortEpochCallback, o)) for o in (.3,.9)], n=120,
         fit=lambda l: l.fit(2, .02), note='It stops after the same window.',
         check=lambda a,b: a.accumulate_step.counts.n_thrown==0),
    # before the fit, in each of four passes, and after it
    case('Callbacks', 'ModelResetter, RNNCallback', cbs=rnn_cbs, **rnn,
         check=lambda a,b: a.model.n_reset==b.model.n_reset==6,
         note='They reset the model at each epoch, not at each window.'),
    case('Callbacks', 'RNNRegularizer', cbs=partial(rnn_cbs, alpha=2., beta=1.), tol=TOL32, **rnn,
         check=lambda a,b: worst(a, pair(rnn_cbs, **rnn)[1])[0]>1e-3,
         note='fastai computes the penalty in float32. It is exact if the weight of a micro-batch is its number of '
              'samples. For other losses, put the penalty into the loss function.'),
    case('Callbacks', 'MicroBatch', *[dict(own=partial(sliced, o)) for o in (False,True)], bs=16, n=90,
         note='Our own. It cuts each micro-batch into slices, with `coupled=True` too.'),
    case('Models', '`channels_last` input and model', **images, check=is_last,
         cbs=lambda: [ChannelsLast(), Callback(before_batch=to_last)]),
    case('Loaders', 'WeightedDL', *tails, dls=draws(WeightedDL, wgts=range(1,77), shuffle=True)),
    case('Loaders', "PyTorch's DataLoader", *tails, dls=of_pytorch),
    case('Loaders', 'PartialDL', dls=draws(PartialDL, partial_n=50),
         *[dict(own=partial(AccumulateStep, **o)) for o in (dict(n_step=4), dict(n_samples=32))]))

@row('Training', '`lr_find`', 'curve and suggestion',
     note='It counts steps. Where the loss diverges, rounding grows, so we leave out the last fifth of the curve.')
def test_curve_of_lr_find(works, tmp_path):
    def find(learn): learn.path = tmp_path; learn.got = tuple(learn.lr_find(num_it=50, show_plot=False))
    ls = pair(fit=find, n=200)
    works.same(*[[l.recorder.lrs,l.recorder.losses[:40],len(l.recorder.losses),l.got] for l in ls])

@row('Callbacks', 'GradientAccumulation', note="fastai's own callback. Use only one of the two.")
def test_gradient_accumulation(works):
    with works.refused(ValueError, match='AccumulateStep: the learner or this fit also has fastai'):
        pair(partial(GradientAccumulation, 32))

class Draws:
    "Replaces a Beta distribution by a table, so that every run has the same draws"
    def __init__(self):
        self.n,self.table = 0,torch.rand(1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    def sample(self, shape): self.n += shape[0]; return self.table[self.n-shape[0]:self.n]

def injected(): cb = MixUp(); cb.distrib = Draws(); return cb

class CutMixByStep(CutMix):
    "The same λ and box for each micro-batch of a window, others for the next"
    def before_batch(self):
        torch.manual_seed(self.train_iter)
        super().before_batch()

def drawing(name, mix, what):
    note = f'It draws {what} and the partners once per micro-batch. We compare with the same draws.'
    return pytest.param(mix, marks=row('Callbacks', name, note=note))

@pytest.mark.parametrize('mix', [drawing('MixUp', injected, 'λ'), drawing('CutMix', CutMixByStep, 'λ, the box')])
@each(loss=[StackedCE(), StackedCE(weight=torch.tensor([1.,5.,20.]).double())])
def test_mixed_with_the_same_draws(loss, mix, works, monkeypatch):
    # permutations that stay within a micro-batch of 8, also for the large batch
    perm = lambda n: torch.cat([torch.arange(i, min(i+8,n)).flip(0) for i in range(0,n,8)])
    monkeypatch.setattr(torch, 'randperm', perm)
    torch.set_default_dtype(torch.float64)   # of λ, which is mixed with the losses
    try: works(*pair(mix, **images, loss_func=loss, matters=True))
    finally: torch.set_default_dtype(torch.float32)

@row('Models', 'ParallelTrainer', note='`DataParallel` on a machine without GPUs, where it has one replica.')
def test_parallel_trainer(works, monkeypatch):
    from fastai.distributed import ParallelTrainer
    # another test may have loaded the simulated accelerator
    module = sys.modules['torch.nn.parallel.data_parallel']
    monkeypatch.setattr(module, '_get_available_device_type', lambda: None)
    works(*pair(lambda: ParallelTrainer(None), **one_group))

# with ATEN_CPU_CAPABILITY=default, PyTorch 2.14 writes C++ that does not compile
can_compile = shutil.which('g++') and os.environ.get('ATEN_CPU_CAPABILITY')!='default'
compiler = pytest.mark.skipif(not can_compile, reason='compiles a model to C++, which this machine cannot')
@row('Models', '`torch.compile`', note='A smaller last micro-batch has another shape, so PyTorch compiles again.')
@pytest.mark.parametrize('backend', ['aot_eager', pytest.param('inductor', marks=compiler)])
@pytest.mark.filterwarnings('ignore')
def test_compile(backend, works):
    works(*pair(model=lambda: torch.compile(small_model(), backend=backend), **one_group))
    torch._dynamo.reset()
