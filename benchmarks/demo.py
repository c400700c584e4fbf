"""Train on scikit-learn's digits four times: with batches of 64, with these in slices of 8, with batches of 8 of which
eight make a step, and the same with fastai's own callback.

    python benchmarks/demo.py          # print the table
    python benchmarks/demo.py --save   # also write it, with the losses, to benchmarks/results/demo.json for the README
"""
import sys,warnings
warnings.filterwarnings('ignore')
from common import *
from sklearn.datasets import load_digits
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fastai_accum.all import *

N_TRAIN,LARGE,BS,EPOCHS = 1500,64,8,10

class Steps(Callback):
    "Count the optimizer steps, and the samples that reached one"
    order = 1000
    def before_fit(self): self.steps = self.samples = self.waiting = 0
    def before_backward(self): self.waiting += len(self.y)
    def before_step(self): self.steps,self.samples,self.waiting = self.steps+1,self.samples+self.waiting,0

def learner(bs, cbs=None):
    "Always the same data in the same order, and the same first weights"
    x,y = load_digits(return_X_y=True)
    x,y = tensor(x/16.).float().reshape(-1,1,8,8),tensor(y)
    set_seed(7)
    trn,val = (list(zip(x[s],y[s])) for s in (slice(N_TRAIN), slice(N_TRAIN,None)))
    dls = DataLoaders(DataLoader(trn, bs=bs, shuffle=True), DataLoader(val, bs=99))
    # SiLU is smooth. With ReLU, rounding can switch a unit on or off, and two runs of the same training drift apart.
    model = nn.Sequential(nn.Conv2d(1,16,3,padding=1), nn.SiLU(), nn.Conv2d(16,32,3,stride=2,padding=1), nn.SiLU(),
                          nn.Flatten(), nn.Linear(512,10))
    learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=[Steps()]+L(cbs))
    learn.remove_cb(ProgressCallback); learn.logger = noop
    return learn

def train_memory(bs, cbs=None):
    "Peak memory of training one window, without the weights, gradients and optimizer state, which are always there"
    learn = learner(bs, cbs)
    learn.dls.train.get_idxs = lambda: list(range(LARGE))
    learn.add_cb(NoValid())
    learn.fit(1)
    return peak_bytes(partial(learn.fit, 1))

def main():
    runs = {f'batches of {LARGE}':(LARGE, lambda: None),
            f'batches of {LARGE}, MicroBatch({BS}, exact=True)':(LARGE, lambda: MicroBatch(BS, exact=True)),
            f'batches of {BS}, AccumulateStep(n_step={LARGE//BS})':(BS, lambda: AccumulateStep(n_step=LARGE//BS)),
            f'batches of {BS}, GradientAccumulation({LARGE})':(BS, lambda: GradientAccumulation(LARGE))}
    print(f'{machine()}\n\n{N_TRAIN} digits, {EPOCHS} epochs of one-cycle training; '
          f'an epoch is {-(-N_TRAIN//LARGE)} batches of {LARGE}, or {-(-N_TRAIN//BS)} of {BS}\n')
    big,rows,losses = None,[],{}
    for name,(bs,cb) in runs.items():
        learn = learner(bs, cb())
        learn.fit_one_cycle(EPOCHS, 1e-2)
        w = torch.cat([p.detach().flatten() for p in learn.model.parameters()])
        big = w if big is None else big
        diff = f'{((w-big).norm()/big.norm()).item():.0e}' if rows else ''
        losses[name] = [round(float(o), 4) for o in learn.recorder.losses]
        rows.append((name, diff, f'{learn.final_record[-1]:.3f}', f'{learn.steps.samples:,} of {N_TRAIN*EPOCHS:,}',
                     learn.steps.steps, f'{train_memory(bs, cb())/2**20:.2f} MiB'))
    cols = ['training', 'difference of the weights', 'accuracy', 'samples that reached a step', 'steps', 'peak memory']
    print(table(rows, cols))
    print(f'\nThe first column of figures is the difference from the batches of {LARGE}. MicroBatch and AccumulateStep '
          f'end with the same weights, up to float32 rounding,\nand need little more memory than batches of {BS}. '
          "fastai's callback ends with other weights;\n"
          'whether they are better or worse in one run is chance.')
    if '--save' in sys.argv: save('demo', rows=rows, cols=cols, losses=losses)

if __name__=='__main__': main()
