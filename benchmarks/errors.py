"""How far fastai's `GradientAccumulation`, fastxtend's rules and `AccumulateStep` are from the large batch, in float64.

    python benchmarks/errors.py               # print the table, ten seconds
    python benchmarks/errors.py --save        # also write it to benchmarks/results/errors.json, for the page "Compared"
    python benchmarks/errors.py --fastxtend   # compare the rules with fastxtend itself, if it is installed

The last one needs a process of its own: importing fastxtend changes the defaults of fastai.
"""
import sys,tempfile,warnings
warnings.filterwarnings('ignore')
from common import *
sys.path.insert(0, str(Path(__file__).resolve().parent.parent/'tests'))
from harness import *
from test_fastais_callback import PerToken,grad_error,learner,losses,once,run

class FastxtendRules(Callback):
    """The rules of fastxtend 0.1's `GradientAccumulation(accum_bs)` with its default `drop_last=True`, reimplemented.

    - A window is a multiple of the loader's batch size.
    - Each micro-batch counts by its share of `accum_bs` samples.
    - When fewer than `accum_bs` samples of an epoch are left, no more micro-batches are trained.
    - Gradients that are left at the end of an epoch are set to zero.
    - `Recorder` runs at the steps only, and sees the sum of the losses, each times its share."""
    order,run_valid = MixedPrecision.order-4,False
    def __init__(self, accum_bs): self.accum_bs = accum_bs

    def before_fit(self):
        self.loss = 0.
        if self.accum_bs%self.dls.train.bs: raise ValueError('the window is no multiple of the batch')

    def before_train(self): self.seen,self.left = 0,self.dls.train.bs*len(self.dls.train)

    def before_batch(self):
        if self.left<self.accum_bs: self.skip()
        self.left -= len(self.x)

    def after_loss(self): self.learn.loss_grad /= self.accum_bs/len(self.x)

    def before_step(self):
        self.seen += len(self.x)
        self.loss += self.learn.loss.detach()*len(self.x)/self.accum_bs
        if self.seen<self.accum_bs: self.skip()
        self.learn.loss,self.loss,self.seen,self.recorder.run_train = self.loss,0.,0,True

    def skip(self): self.recorder.run_train = False; raise CancelBatchException

    def after_train(self): self.recorder.run_train = True; self.opt.zero_grad()

class Reached(Callback):
    "Count the samples that reached a step"
    order = 1000
    def before_fit(self): self.n = self.waiting = 0
    def before_backward(self): self.waiting += len(self.y)
    def before_step(self): self.n,self.waiting = self.n+self.waiting,0

def gradient(learn, big, step=0):
    "Error of the gradient of a step"
    return grad_error(learn, big, step) if learn.spy.steps else 'no step'

def after(then, bs=64):
    "Error of the first step of `then`, which runs after a fit, from the same weights and in batches of `bs`"
    def case(acc):
        a,b = learner(208, 8, acc(64)),learner(208, bs)
        with tempfile.TemporaryDirectory() as d:
            for l in a,b: l.path = Path(d); l.fit(1)
            b.model.load_state_dict(a.model.state_dict())
            for l in a,b: l.spy.steps = []; then(l)
        return gradient(a, b)
    return case

def remove(learn):
    learn.remove_cbs(learn.cbs.filter(lambda o: 'Accum' in type(o).__name__ or isinstance(o, FastxtendRules)))
    learn.fit(1)

def anew(learn): learn.fit(1, reset_opt=True)

def search(learn): learn.lr_find(num_it=8, show_plot=False, suggest_funcs=None)

def frozen(acc):
    "How far frozen weights move"
    learn = learner(208, 8, acc(64)); learn.fit(1); learn.freeze()
    old = [p.clone() for p in learn.model[0].parameters()]
    learn.fit(1, wd=0.)
    return f'{max(((p-o).norm()/o.norm()).item() for p,o in zip(learn.model[0].parameters(), old)):.2%}'

def uneven(name):
    "A case of the tests, with two windows of 32 samples instead of one"
    def case(acc):
        loss,y,*n = losses[name]
        def train(bs, cb=None):
            learn = learner(64, bs, cb, y=torch.cat([y,y]), loss=loss)
            if n: learn.model = PerToken(*n); learn.splitter = trainable_params
            if y.ndim==3: learn.model = nn.Sequential(learn.model, nn.Unflatten(2, (4,4)))
            learn.fit(1)
            return learn
        return gradient(train(8, acc(32)), train(32))
    return case

class PerTokenOfAnyLength(nn.Module):
    "Logits of 3 classes at each token, in the second dimension"
    def __init__(self): super().__init__(); self.net = small_model()
    def forward(self, x): return self.net(x).transpose(1,2)

def stream(acc):
    "The texts of a language model in pieces of 72 + 72 + 72 + 9 tokens, two texts at a time, twice"
    texts = list(zip(features(4*225).reshape(4,225,6), classes(4*225).reshape(4,225)))
    pieces = [(x[i:i+72],y[i:i+72]) for two in (texts[:2],texts[2:]) for i in range(0,225,72) for x,y in two]
    def train(items, cb=None):
        learn = make_learner(make_dls(32, 2), PerTokenOfAnyLength(), opt_func=SGD, cbs=cb, splitter=trainable_params)
        learn.dls = DataLoaders(DataLoader(items, bs=2), DataLoader(items[:2], bs=2))
        learn.fit(1)
        return learn
    return gradient(train(pieces, acc(8)), train(texts))

def ignored(acc):
    y = classes(64); y[8:16] = -100
    rec,big = (run(once, 64, bs, cb, y=y).recorder for bs,cb in ((8,acc(32)), (32,None)))
    return 'NaN' if any(map(math.isnan, rec.losses)) else rel(rec.losses[:1], big.losses[:1])[0]

def ends_in_sqrt(acc):
    loss = lambda pred,targ: F.cross_entropy(pred, targ).sqrt()
    run(once, 64, 8, acc(32), loss=loss)
    return 'trains on its mean'

def lost(n, large, drop_last):
    def case(acc):
        learn = learner(n, 8, L(acc(large))+Reached(), drop_last=drop_last); learn.fit(1)
        return f'{1-learn.reached.n/n:.0%}'
    return case

def schedule(acc):
    fit = lambda l: l.fit_one_cycle(1, .1)
    a,b = ([o['hypers'][-1]['lr'] for o in l.spy.steps] for l in (run(fit, 256, 8, acc(32)), run(fit, 256, 32)))
    first,last = a[0]/b[0],a[-1]/b[len(a)-1]
    if len(a)==len(b) and max(abs(first-1), abs(last-1))<1e-9: return 'right'
    missing = f', and {len(b)-len(a)} step of {len(b)} is missing' if len(a)<len(b) else ''
    return f'{off(first)} at the start, {off(last)} at the end{missing}'

def off(ratio): return f'{ratio:.2g} times too high' if ratio>1 else f'{1/ratio:.2g} times too low'

def lr_find(acc):
    with tempfile.TemporaryDirectory() as d:
        learn = learner(80, 8, acc(32)); learn.path = Path(d)
        learn.lr_find(num_it=100, show_plot=False, suggest_funcs=None, stop_div=False)
    return len(learn.spy.steps)

def cancelled(acc):
    "The number of losses that a plain fit of 5 steps records, after an earlier fit was cancelled in the middle of a window"
    learn = learner(80, 16, acc(64))
    def stop(cb):
        if cb.iter==1: raise CancelFitException
    learn.fit(1, cbs=Callback(before_batch=stop))
    remove(learn)
    return f'{len(learn.recorder.losses)} of 5'

def plain(bs, n, large=None):
    "Windows of `n` samples, in which batches of `bs` make windows of `large` samples"
    large = large or n
    return lambda acc: gradient(run(once, 4*large, bs, acc(n)), run(once, 4*large, large))

clipped = lambda acc: gradient(run(once, 128, 8, L(acc(32))+GradientClip(.1)), run(once, 128, 32, GradientClip(.1)))

def sum_kept(acc):
    total = nn.CrossEntropyLoss(reduction='sum')
    return gradient(run(once, 64, 8, acc(32, average=False), loss=total), run(once, 64, 32, loss=total))

GRAD  = 'How far is the gradient of a step from that of the large batch?'
NEXT  = 'What does a fit leave behind? How far is the first gradient of the next fit from that of the large batch?'
OTHER = 'What happens to samples, steps and logs?'
LOADERS = ('a loader with `drop_last=False`',False),("a loader with `drop_last=True`, fastai's default in training",True)
cases = [
    ('Batches of 8, windows of 32 samples',                             GRAD,  plain(8, 32)),
    ('Batches of 8, windows of 32 samples, with `GradientClip`',        GRAD,  clipped),
    ('Batches of 12, windows of 32 samples',                            GRAD,  plain(12, 32, 36)),
    ('Batches of 24, windows of 32 samples',                            GRAD,  plain(24, 32, 48)),
    ('Batches of 20, windows of 64 samples',                            GRAD,  plain(20, 64, 80)),
    ('Batches of 48, windows of 64 samples',                            GRAD,  plain(48, 64, 96)),
    ('Batches of 16, windows of 4 samples',                             GRAD,  plain(16, 4, 16)),
    ('Batches of 64, windows of 4 samples',                             GRAD,  plain(64, 4, 64)),
    ('Batches of 64, windows of 2 samples',                             GRAD,  plain(64, 2, 64)),
    ('Class weights: a rare class counts ten times',                    GRAD,  uneven('minority')),
    ('Class weights: inverse frequency',                                GRAD,  uneven('inverse')),
    ('Texts of different lengths, padding ignored by `ignore_index`',   GRAD,  uneven('texts')),
    ('The same texts, sorted by length',                                GRAD,  uneven('sorted_texts')),
    ('Segmentation, void pixels ignored by `ignore_index`',             GRAD,  uneven('void_pixels')),
    ("A language model's short last batch",                             GRAD,  stream),
    ("A loss with `reduction='sum'`, which stays a sum",                GRAD,  sum_kept),
    ('`DiceLoss`, which sums by default',                               GRAD,  uneven('kept_sum')),
    ('The next `fit`, after an epoch with a smaller last window',       NEXT,  after(once)),
    ('The same with `reset_opt=True`',                                  NEXT,  after(anew)),
    ('`lr_find`, after an epoch with a smaller last window',             NEXT,  after(search)),
    ('A fit after the callback was removed',                            NEXT,  after(remove, bs=8)),
    ('A fit ends with a smaller window, and you freeze weights: how far does the next fit move them?', OTHER, frozen),
    *((f'{n} samples, windows of {large}, {loader}: how many samples reach no step?', OTHER, lost(n, large, drop_last))
      for n,large in ((80,64),(48,64),(64,32)) for loader,drop_last in LOADERS),
    ('Is the learning rate of `fit_one_cycle` right, with windows of 4 micro-batches?', OTHER, schedule),
    ('How many steps does `lr_find(num_it=100)` make?',                 OTHER, lr_find),
    ('All targets of a micro-batch are ignored: how far is the logged loss off?', OTHER, ignored),
    ('The loss ends in `sqrt`: what does the fit do?',                  OTHER, ends_in_sqrt),
    ('A fit is cancelled in the middle of a window: how many of its losses does the next fit record?', OTHER, cancelled),
]

def ours(n, **kwargs): return AccumulateStep(n_samples=n, **kwargs)
def theirs(cls): return lambda n, **kwargs: cls(n)
columns = {'fastai':theirs(GradientAccumulation), 'fastxtend':theirs(FastxtendRules), 'AccumulateStep':ours}

def measure(case, acc):
    try: return case(acc)
    except (ValueError,RuntimeError,AttributeError) as e: return f'raises {type(e).__name__}'

def figure(res):
    if isinstance(res, (str,int)): return str(res)
    return '0' if res==0 else f'{res:.0e}' if res<1e-3 else f'{res:.2f}'


def table_rows():
    return [(name, what, *(figure(measure(case, acc)) for acc in columns.values())) for name,what,case in cases]

def compare():
    "fastxtend's own figures beside those of its rules; whether they are the same"
    from fastxtend.callback.gradaccum import GradientAccumulation as Theirs
    rows = [(name, *(figure(measure(case, theirs(cls))) for cls in (Theirs,FastxtendRules))) for name,_,case in cases]
    print(table(rows, ['case','fastxtend','its rules']))
    return all(a==b for _,a,b in rows)

if __name__=='__main__':
    torch.set_num_threads(1)
    if '--fastxtend' in sys.argv: sys.exit(not compare())
    rows,cols = table_rows(),['case','question','fastai',"fastxtend's rules",'AccumulateStep']
    print(machine()+'\n\n'+table(rows, cols))
    if '--save' in sys.argv: save('errors', rows=rows, cols=cols)
