"""What the first users of accumulation tried on MNIST, with this callback: does it train as the large batch, and what does it bring over tiny batches?

    python benchmarks/mnist.py                  # print the tables, about ten minutes on two cores; fastai downloads MNIST
    python benchmarks/mnist.py --data FOLDER    # with MNIST's own files (t10k-images-idx3-ubyte.gz and the labels) in FOLDER
    python benchmarks/mnist.py --save           # and write the figures to benchmarks/results/mnist.json, which the docs show
"""
import argparse,warnings
from common import *
warnings.filterwarnings('ignore')
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai_accum.core import AccumulateStep

EPOCHS,LR,LRS = 4,1e-2,(1e-2,1e-1,5e-1)   # `fit(4)`; plain SGD

def learner(xy, bs, n_step=1, seed=0, lr=LR):
    "A network without batch norm and without dropout; 8,000 images to train on, and 2,000 to validate"
    set_seed(seed)
    x,y = xy
    items = list(zip(x, y))
    dls = DataLoaders(DataLoader(items[:8000], bs=bs, shuffle=True), DataLoader(items[8000:], bs=500))
    model = nn.Sequential(nn.Flatten(), nn.Linear(784,50), nn.ReLU(), nn.Linear(50,10))
    learn = Learner(dls, model, loss_func=nn.CrossEntropyLoss(), opt_func=SGD, lr=lr, metrics=accuracy, cbs=AccumulateStep(n_step) if n_step>1 else None)
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

def run(xy, **kwargs):
    "Validation loss and accuracy after training, and the seconds that training took"
    learn = learner(xy, **kwargs)
    t = time.perf_counter(); learn.fit(EPOCHS); t = time.perf_counter()-t
    loss,acc = learn.validate()
    return dict(loss=loss, acc=acc, seconds=t, weights=torch.cat([p.detach().flatten() for p in learn.model.parameters()]).double())

def compare(xy, seeds, a, b):
    "Train with the settings `a` and `b` in turn, from the same seeds"
    pairs = []
    for i in range(seeds):
        ra,rb = [run(xy, seed=i, **o) for o in ((a,b) if i%2 else (b,a))][::1 if i%2 else -1]
        far = ((ra['weights']-rb['weights']).norm()/rb['weights'].norm()).item()
        pairs.append(dict(acc=[ra['acc'],rb['acc']], loss=[ra['loss'],rb['loss']], seconds=ra['seconds']/rb['seconds'], weights=far))
    return pairs

def spread(vs, fmt='.4f'): return f"{statistics.median(vs):{fmt}} ({min(vs):{fmt}} to {max(vs):{fmt}})"

if __name__=='__main__':
    p = argparse.ArgumentParser()
    p.add_argument('--data', type=Path); p.add_argument('--seeds', type=int, default=10); p.add_argument('--save', action='store_true')
    args = p.parse_args()
    print(machine())
    xy = mnist(args.data)
    same = compare(xy, args.seeds, dict(bs=8, n_step=4), dict(bs=32))
    tiny = {lr:compare(xy, args.seeds, dict(bs=4, n_step=8, lr=lr), dict(bs=4, lr=lr)) for lr in LRS}
    print(f'\nBatches of 8 with AccumulateStep(n_step=4), and batches of 32: {args.seeds} seeds, median (least to most)\n')
    cols = ['','8 × 4','32','difference']
    def rows(ps): return [(k, spread([o[k][0] for o in ps]), spread([o[k][1] for o in ps]), spread([o[k][0]-o[k][1] for o in ps], '.1e')) for k in ('acc','loss')]
    print(table(rows(same), cols))
    print(f"\nweights differ by {spread([o['weights'] for o in same], '.0e')}")
    print('\nBatches of 4 with AccumulateStep(n_step=8), and batches of 4 without, at three learning rates\n')
    print(table([(lr, *row) for lr,ps in tiny.items() for row in rows(ps)], ['lr','','4 × 8','4','difference']))
    print(f"\ntime with over time without: {spread([o['seconds'] for ps in tiny.values() for o in ps], '.3f')}")
    if args.save: save('mnist', epochs=EPOCHS, lr=LR, seeds=args.seeds, same=same, tiny=tiny)
