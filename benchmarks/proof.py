"""What the proof before the first step costs: in plain steps of the learner, and in seconds.

    python benchmarks/proof.py                # print the table
    python benchmarks/proof.py --save         # and write it to benchmarks/results/proof.json, which the docs show
    python benchmarks/proof.py --only U-Net   # some of the learners

Everything runs on one thread of the CPU. A plain step is one of the learner without our callbacks, after one that warms up. Seconds are those that the
processor has worked, so that other work on the machine does not count. Each proof has a process of its own. Weights are random, and nothing is downloaded.
"""
import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from common import *
from fastai.text.all import *
from fastai.vision.all import *
from fastai_accum.all import *
from fastai_accum import microbatch as cutting
from fastai_accum.proof import guard
from fastai_accum.memory import checkpointing

ways = dict(exact=lambda: MicroBatch(4, exact=True), coupled=lambda: MicroBatch(4, coupled=True), checkpointing=GradientCheckpointing)

def loaders(xb, yb, **kwargs):
    dls = DataLoaders(*[DataLoader([(xb,yb)]*3, bs=None) for _ in range(2)])
    for k,v in kwargs.items(): setattr(dls, k, v)
    return dls
def images(n, px): return torch.randn(n, 3, px, px)
def classes(*size, c=3): return torch.randint(c, size)
kw = dict(pretrained=False, normalize=False)

def resnet(): return vision_learner(loaders(images(16, 128), classes(16)), resnet34, n_out=3, loss_func=CrossEntropyLossFlat(), **kw)
def unet():
    dls = loaders(images(8, 128), classes(8, 128, 128))
    dls.one_batch = lambda: dls.train.one_batch()
    return unet_learner(dls, resnet34, n_out=3, loss_func=CrossEntropyLossFlat(axis=1), **kw)
def awd_lstm():
    words = [str(i) for i in range(7000)]
    dls = loaders(torch.randint(2, 7000, (32,72)), classes(32), vocab=L(words,['a','b','c']))
    return text_classifier_learner(dls, AWD_LSTM, pretrained=False, n_out=3, loss_func=CrossEntropyLossFlat())
class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        import transformers as tf
        self.m = tf.BertForSequenceClassification(tf.BertConfig(num_labels=3))
    def forward(self, x): return self.m(x).logits
def bert(): return Learner(loaders(torch.randint(5, 30_000, (8,128)), classes(8)), Bert(), CrossEntropyLossFlat())

def awd_lstm_small():
    words = [str(i) for i in range(7000)]
    dls = loaders(torch.randint(2, 7000, (16,40)), classes(16), vocab=L(words,['a','b','c']))
    return text_classifier_learner(dls, AWD_LSTM, pretrained=False, n_out=3, loss_func=CrossEntropyLossFlat())

learners = {'ResNet-34, 16 images of 128 pixels':resnet, 'text_classifier_learner(AWD_LSTM), 32 texts of 72 tokens':awd_lstm,
            'text_classifier_learner(AWD_LSTM), 16 texts of 40 tokens':awd_lstm_small,
            'U-Net on a ResNet-34, 8 images of 128 pixels':unet, 'BERT with 110 million parameters, 8 texts of 128 tokens':bert}

class Times(Callback):
    "Notes the time of the processor at each step"
    order,run_valid = 1e9,False
    def __init__(self): self.at = []
    def after_batch(self): self.at.append(time.process_time())
    def before_validate(self): raise CancelValidException

def plain(make):
    "Seconds of a plain step"
    learn,times = make(),Times()
    with learn.no_bar(),learn.no_logging(): learn.fit(1, 1e-5, cbs=times)
    return min(b-a for a,b in zip(times.at, times.at[1:]))

def proof(make, way):
    "Seconds of the proof"
    learn,took = make(),[]
    def timed(*args):
        start = time.process_time()
        guard.guard(*args)
        took.append(time.process_time()-start)
        raise CancelFitException
    cutting.guard = checkpointing.guard = timed
    with learn.no_bar(),learn.no_logging(): learn.fit(1, cbs=ways[way]())
    return took[0]

def alone(f, *args):
    "What `f` returns in a process of its own"
    with ProcessPoolExecutor(1, mp_context=get_context('fork')) as pool: return pool.submit(f, *args).result()

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--save', action='store_true'); p.add_argument('--only', nargs='*'); p.add_argument('--way', nargs='*')
    args = p.parse_args()
    torch.set_num_threads(1)
    print(machine())
    rows = []
    for name,make in learners.items():
        if args.only and not any(o in name for o in args.only): continue
        step = alone(plain, make)
        for way in args.way or ways:
            t = alone(proof, make, way)
            rows.append(dict(learner=name, way=way, step=step, proof=t, ratio=t/step))
            print(f'{name} | {way} | step {step:.2f} s | proof {t:.2f} s | {t/step:.1f} steps', flush=True)
    if args.save: save('proof', rows=rows)
