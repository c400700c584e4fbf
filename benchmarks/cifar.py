"""Batch norm under accumulation: a residual network on CIFAR images with batches of 32 and with 8 × 4, where the difference comes from, and what helps.

    python benchmarks/cifar.py                  # print the tables, an hour or more on two cores; fastai downloads CIFAR
    python benchmarks/cifar.py --data FOLDER    # with the images in FOLDER/train/CLASS and FOLDER/test/CLASS
    python benchmarks/cifar.py --save           # and write the figures to benchmarks/results/cifar.json, which the docs show
"""
import argparse,warnings
from multiprocessing import get_context
from common import *
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import ParamScheduler
from fastai.callback.training import GradientAccumulation
from fastai_accum.all import *
from timm.utils.agc import adaptive_clip_grad

def slow_statistics(model, n_step):
    "Let `n_step` updates of the running statistics leave the share of the old values that one leaves now"
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm): m.momentum = 1-(1-m.momentum)**(1/n_step)
    return model

EPOCHS,LR = 4,3e-3

def conv(ni, nf, ks=3, stride=1): return nn.Conv2d(ni, nf, ks, stride, ks//2, bias=False),nn.BatchNorm2d(nf)

class Residual(nn.Module):
    def __init__(self, ni, nf, stride=1):
        super().__init__()
        self.convs = nn.Sequential(*conv(ni, nf, stride=stride), nn.ReLU(), *conv(nf, nf))
        self.shortcut = nn.Identity() if ni==nf and stride==1 else nn.Sequential(*conv(ni, nf, 1, stride))
    def forward(self, x): return F.relu(self.convs(x)+self.shortcut(x))

def resnet(w=16):
    "A residual network: seven convolutions of 3 × 3 and two of 1 × 1, each with batch norm"
    return nn.Sequential(*conv(3, w, stride=2), nn.ReLU(), Residual(w, w), Residual(w, 2*w, 2), Residual(2*w, 4*w, 2),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4*w, 10))

def no_norm(model):
    "`model` without batch norm. The last convolution of each block begins at zero, so that at first the block does nothing but its shortcut"
    for m in list(model.modules()):
        if isinstance(m, nn.Conv2d): nn.init.kaiming_normal_(m.weight)
        for name,child in m._modules.items():
            if isinstance(child, nn.BatchNorm2d): m._modules[name] = nn.Identity()
    for m in model:
        if isinstance(m, Residual): nn.init.zeros_(m.convs[3].weight)
    return model

class ClipEachUnit(Callback):
    "The adaptive clipping of Brock et al. (2021), in timm, for all but the last layer"
    order = 11   # after mixed precision
    def before_step(self): adaptive_clip_grad(self.model[:-1].parameters(), .01)

class LateSchedule(Callback):
    "A schedule that counts micro-batches in windows of 4: each step gets the value of its last micro-batch, which is 3/4 of a step too late"
    order,run_valid = ParamScheduler.order-1,False
    def before_batch(self): self.learn.pct_train += .75/(self.n_iter*self.n_epoch)
    def after_batch(self): self.learn.pct_train -= .75/(self.n_iter*self.n_epoch)

def to_group_norm(m):
    "The recipe of the page on batch norm"
    for k,o in m.named_children():
        to_group_norm(o)
        if isinstance(o, nn.BatchNorm2d):
            n = o.num_features
            gn = nn.GroupNorm(math.gcd(n, min(32, max(1, n//8))), n, o.eps)
            gn.weight,gn.bias = o.weight,o.bias
            setattr(m, k, gn)
    return m

# How each run is trained. The others are compared with the first
arms = {
    '32':                         dict(bs=32),
    '8 × 4':                      dict(bs=8, cbs=lambda: AccumulateStep(4)),
    '8 × 4, momentum':            dict(bs=8, cbs=lambda: AccumulateStep(4), change=partial(slow_statistics, n_step=4)),
    '32, late schedule':          dict(bs=32, cbs=LateSchedule),
    '32, last window dropped':    dict(bs=32, drop_last=True),
    'GradientAccumulation':       dict(bs=8, cbs=lambda: GradientAccumulation(32)),
    '4 × 8':                      dict(bs=4, cbs=lambda: AccumulateStep(8)),
    '2 × 16':                     dict(bs=2, cbs=lambda: AccumulateStep(16)),
    '2 × 16, momentum':           dict(bs=2, cbs=lambda: AccumulateStep(16), change=partial(slow_statistics, n_step=16)),
    'constant lr, 32':            dict(bs=32, fit=Learner.fit),
    'constant lr, 8 × 4':         dict(bs=8, cbs=lambda: AccumulateStep(4), fit=Learner.fit),
    'constant lr, 8 × 4, momentum': dict(bs=8, cbs=lambda: AccumulateStep(4), change=partial(slow_statistics, n_step=4), fit=Learner.fit),
    'group norm, 32':             dict(bs=32, change=to_group_norm),
    'group norm, 8 × 4':          dict(bs=8, cbs=lambda: AccumulateStep(4), change=to_group_norm),
    'no norm, clipped, 32':       dict(bs=32, cbs=ClipEachUnit, change=no_norm),
    'no norm, clipped, 8 × 4':    dict(bs=8, cbs=lambda: [AccumulateStep(4), ClipEachUnit()], change=no_norm),
}
# On five classes with a new head, after training on the other five
tuned = {
    '32':                   dict(bs=32),
    '8 × 4':                dict(bs=8, cbs=lambda: AccumulateStep(4)),
    'BatchNormEval, 32':    dict(bs=32, cbs=BatchNormEval),
    'BatchNormEval, 8 × 4': dict(bs=8, cbs=lambda: [AccumulateStep(4), BatchNormEval()]),
}

# The whole batch of 32, and the ways to keep it
wholes = {
    '32':                    dict(bs=32),
    'exact, 8 × 4':          dict(bs=32, cbs=lambda: MicroBatch(8, exact=True)),
    'checkpointing':         dict(bs=32, cbs=lambda: GradientCheckpointing()),
    'float64, 32':           dict(bs=32, change=nn.Module.double),
    'float64, exact, 8 × 4': dict(bs=32, change=nn.Module.double, cbs=lambda: MicroBatch(8, exact=True)),
}

class Double(Callback):
    "Images and losses in float64"
    order = -50
    def before_fit(self): self.learn.recorder.smooth_loss = Smooth64()
    def before_batch(self): self.learn.xb = self.xb[0].double(),

class Smooth64(AvgSmoothLoss):
    def reset(self): self.count,self.val = 0,torch.zeros((), dtype=torch.float64)

def train(data, seed, bs, cbs=None, change=noop, drop_last=False, fit=Learner.fit_one_cycle, body=None):
    "Return a learner that was trained from `seed`. If `body` is given, training starts from its weights, and `seed` decides the order only"
    set_seed(seed)
    train,test = (list(zip(*o)) for o in data)
    dls = DataLoaders(DataLoader(train, bs=bs, shuffle=True, drop_last=drop_last), DataLoader(test, bs=500))
    model = resnet()
    if body: model[:-1].load_state_dict(body)   # the head is new
    model = change(model)
    if first(model.parameters()).dtype is torch.float64: cbs = partial(lambda old: [Double(),*L(old and old())], cbs)
    learn = Learner(dls, model, loss_func=nn.CrossEntropyLoss(), metrics=accuracy, cbs=cbs and cbs())
    learn.remove_cb(ProgressCallback); learn.logger = noop
    fit(learn, EPOCHS, LR)
    return learn

def figures(learn):
    "The share of test images with a wrong prediction, the mean loss, and all weights in one vector"
    loss,acc = learn.validate()
    return dict(error=1-acc, loss=loss, weights=torch.cat([p.detach().flatten() for p in learn.model.parameters()]).double())

def classes(data, keep): return [(x[m],y[m]) for x,y in data for m in [torch.isin(y, torch.tensor(keep))]]

def one(folder, kind, name, seed):
    "The figures of one training, or of all trainings that start from its weights"
    torch.set_num_threads(1)
    print(f'seed {seed}: {name or kind}', file=sys.stderr)
    data = cifar(folder)
    if kind!='tune': return {name:figures(train(data, seed, **dict(train=arms, whole=wholes)[kind][name]))}
    start = train(classes(data, range(5)), seed, bs=32).model[:-1].state_dict()
    return {k:figures(train(classes(data, range(5,10)), seed, body=start, **o)) for k,o in tuned.items()}

kinds = dict(train=arms, tune=[''], whole=wholes)
def jobs(seeds, some): return [(kind, name, seed) for seed in range(seeds) for kind in some for name in kinds[kind]]

def far(ps, qs): return [((p['weights']-q['weights']).norm()/q['weights'].norm()).item() for p,q in zip(ps, qs)]
sames = {'8 × 4, momentum':'8 × 4', 'group norm, 8 × 4':'group norm, 32', 'no norm, clipped, 8 × 4':'no norm, clipped, 32', 'BatchNormEval, 8 × 4':'BatchNormEval, 32',
         'exact, 8 × 4':'32', 'checkpointing':'32', 'float64, exact, 8 × 4':'float64, 32'}   # which runs should have the same weights

def gather(todo, results):
    "The error and the loss for each seed; and for runs that should end with the same weights, how far apart the weights are"
    runs = {}
    for (kind,_,_),figs in zip(todo, results):
        for k,o in figs.items(): runs.setdefault(kind, {}).setdefault(k, []).append(o)
    same = {a:far(os[a], os[b]) for a,b in sames.items() for os in runs.values() if a in os and b in os}
    return {kind:{k:{f:[o[f] for o in os] for f in ('error','loss')} for k,os in figs.items()} for kind,figs in runs.items()},same

def own_base(name):
    "The run that `name` is compared with: the same in batches of 32, or batch norm in batches of 32"
    return name.replace('exact, ','').split('8 × 4')[0]+'32' if '8 × 4' in name else '32'

if __name__=='__main__':
    p = argparse.ArgumentParser()
    p.add_argument('--data', type=Path); p.add_argument('--save', action='store_true')
    p.add_argument('--seeds', type=int, default=10); p.add_argument('--workers', type=int, default=os.cpu_count())
    p.add_argument('--kinds', nargs='*', default=list(kinds), choices=list(kinds), help='run only these; with --save, the saved figures of the others stay')
    args = p.parse_args()
    print(machine())
    cifar(args.data)   # download once
    todo = jobs(args.seeds, args.kinds)
    with get_context('spawn').Pool(args.workers) as pool: res,same = gather(todo, pool.starmap(one, [(args.data, *o) for o in todo], chunksize=1))
    mean = lambda vs: f'{statistics.mean(vs):.3f} ± {statistics.stdev(vs)/len(vs)**.5:.3f}' if len(vs)>1 else f'{vs[0]:.3f}'
    print('\nError: the share of the test images that are wrong. ± is the standard error of the mean over the seeds')
    for kind in args.kinds:
        rows = [(k, own_base(k), o) for k,o in res[kind].items()]
        rows = [(k, mean(o['error']), base, mean([a-b for a,b in zip(o['error'], res[kind][base]['error'])]), mean(o['loss'])) for k,base,o in rows]
        print('\n'+table(rows, [kind,'error','compared with','error minus its error, same seeds','loss']))
    print('\nWeights, relative difference to the run that should have the same: '+', '.join(f'{k} {min(v):.0e} to {max(v):.0e}' for k,v in same.items()))
    if args.save:
        path = Path(__file__).parent/'results'/'cifar.json'
        old = json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}
        if 'train' in args.kinds: old.update(seeds=args.seeds, machine=machine())
        if 'whole' in args.kinds: old.update(whole_machine=machine())
        save('cifar', **{**old, 'epochs':EPOCHS, 'lr':LR, **res, 'same':{**old.get('same', {}), **same}})
