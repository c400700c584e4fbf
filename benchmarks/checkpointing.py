"""What `GradientCheckpointing` costs in time, for common architectures. benchmarks/memory.py measures what it saves in memory, for the same ones.

    python benchmarks/checkpointing.py            # print the table, about six minutes on two cores
    python benchmarks/checkpointing.py --save     # and write it to benchmarks/results/checkpointing.json, which the docs show
    python benchmarks/checkpointing.py --pairs 2  # a quick look
"""
import argparse,warnings
from functools import partial
from common import *
if __name__=='__main__': keep_memory()
warnings.filterwarnings('ignore')
from fastai.vision.all import *
from fastai.text.all import AWD_LSTM,awd_lstm_clas_config,get_text_classifier,rnn_cbs
from fastai.callback.progress import ProgressCallback
from torchvision.models import VisionTransformer
from fastai_accum.memory.checkpointing import GradientCheckpointing

def body(arch): return partial(create_vision_model, arch, 10, pretrained=False)
def timm_body(arch): return create_timm_model(arch, 10, pretrained=False)[0]

class Bert(nn.Module):
    "A BERT of six layers that classifies sequences of 128 tokens"
    def __init__(self):
        super().__init__()
        from transformers import BertConfig,BertForSequenceClassification
        self.model = BertForSequenceClassification(BertConfig(vocab_size=5000, hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024, num_labels=10))
    def forward(self, x): return self.model(x).logits

def images(bs=16, px=128): return torch.randn(bs,3,px,px),torch.randint(10, (bs,))
def masks(bs=4, px=128): return torch.randn(bs,3,px,px),torch.randint(10, (bs,px,px))
def texts(bs=16, n=128): return torch.randint(5000, (bs,n)),torch.randint(10, (bs,))

nets = {'ResNet-18':(body(resnet18), images), 'ResNet-34':(body(resnet34), images), 'ResNet-50':(body(resnet50), images), 'xresnet50':(partial(xresnet50, n_out=10), images),
        'DenseNet-121':(body(densenet121), images), 'VGG-16 with batch norm':(body(vgg16_bn), partial(images, 8)),
        'U-Net on a ResNet-34, 4 images':(partial(create_unet_model, resnet34, 10, (128,128), pretrained=False), masks),
        'ConvNeXt-T (timm)':(partial(timm_body, 'convnext_tiny'), images),
        'ViT, 8 layers of 384':(partial(VisionTransformer, 128, 16, 8, 6, 384, 1536, num_classes=10), images), 'BERT, 6 layers of 256, 128 tokens':(Bert, texts),
        'AWD-LSTM, 3 layers, 144 tokens':(partial(get_text_classifier, AWD_LSTM, 5000, 10, config={**awd_lstm_clas_config, 'emb_sz':200, 'n_hid':400}), partial(texts, n=144))}

def learner(net, cbs=None, device=None):
    make,data = nets[net]
    torch.manual_seed(0)
    device = device or default_device()
    batches = [tuple(o.to(device) for o in data())]
    dls = DataLoaders(DataLoader(batches, bs=None), DataLoader(batches, bs=None), device=device)
    learn = Learner(dls, make().to(device), loss_func=nn.CrossEntropyLoss(), lr=1e-3, cbs=[NoValid()]+L(rnn_cbs() if 'LSTM' in net else None)+L(cbs))
    learn.remove_cb(ProgressCallback); learn.logger = noop
    learn.fit(1)
    return learn

def costs(net, pairs):
    plain,ckpt = learner(net),learner(net, GradientCheckpointing())
    time,pm = paired(partial(clock, partial(ckpt.fit, 1)), partial(clock, partial(plain.fit, 1)), pairs)
    return dict(net=net, time=time, pm=pm)

if __name__=='__main__':
    p = argparse.ArgumentParser(); p.add_argument('--pairs', type=int, default=6); p.add_argument('--save', action='store_true'); args = p.parse_args()
    print(machine())
    rows = []
    for net in nets:
        rows.append(costs(net, args.pairs))
        print(f"{net}: {rows[-1]['time']:.2f}", flush=True)
    print(f'\nTime with `GradientCheckpointing` over that of the plain run (medians of {args.pairs} pairs)\n')
    print(table([(r['net'], f"{r['time']:.2f} ± {r['pm']:.2f}") for r in rows], ['model','time']))
    if args.save: save('checkpointing', pairs=args.pairs, rows=rows)
