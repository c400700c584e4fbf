"""Each application that fastai ships, and what people build on top of it, in micro-batches and with the large batch.

`both` trains what a learner function of fastai makes, in float64 (`ready`), with the plain losses of `torch.nn` (see
`harness`)."""
import pandas as pd
from fastai.vision.all import (CategoryBlock, DataBlock, DynamicUnet, Flip, ImageBlock, IndexSplitter, MaskBlock,
                               MultiCategoryBlock, PILImageBW,
                               RegressionBlock, Resize, Rotate, TransformBlock, resnet18, vision_learner)
from fastai.tabular.all import Categorify, FillMissing, Normalize, TabularPandas, tabular_config, tabular_learner
from fastai.collab import CollabDataLoaders, collab_learner
from fastai.text.data import LMDataLoader,SortedDL,pad_chunk,pad_input_chunk
from fastai.text.models.core import AWD_LSTM,get_language_model,get_text_classifier
from fastai.vision.gan import AdaptiveGANSwitcher,FixedGANSwitcher,GANLearner
from torchvision.models.resnet import BasicBlock,ResNet
from sklearn.datasets import load_digits
from matrix import *
from pasted import recipe
from fastai_accum.extras import *

N,VALID = 73,16   # samples in training, of which micro-batches of 8 leave a single one, and in validation
CPU = torch.device('cpu')
app = partial(row, 'Applications')

class Double(Callback):
    "Inputs and targets in float64"
    def before_batch(self):
        self.learn.xb,self.learn.yb = (apply(lambda o: o.double() if torch.is_floating_point(o) else o, b)
                                       for b in (self.xb,self.yb))

def ready(learn, cbs):
    "`learn` as `make_learner` would have made it"
    learn.add_cbs([Spy(), Double(), *cbs])
    learn.remove_cb(ProgressCallback)
    learn.model.double()
    learn.recorder.smooth_loss,learn.logger = AvgSmoothLoss64(),noop
    return learn

def both(make, fit=once, bs=8, n_step=4, **kwargs):
    "`fit` what `make(bs)` gives, in micro-batches and with the large batch"
    def train(bs, *cbs):
        set_seed(0)
        learn = ready(make(bs), cbs)
        fit(learn)
        return learn
    return train(bs, AccumulateStep(n_step, **kwargs)),train(bs*n_step)

def loaders(bs, blocks, getters, drop_last=False, **kwargs):
    "Items are numbers, of which `getters` make inputs and targets"
    block = DataBlock(blocks, splitter=IndexSplitter(range(N, N+VALID)), getters=getters, **kwargs)
    return block.dataloaders(range(N+VALID), bs=bs, val_bs=VALID, drop_last=drop_last, device=CPU)

pixels,digit = load_digits(return_X_y=True)
pixels = (pixels.reshape(-1, 8, 8)*15).astype(np.uint8)
def grey(i): return pixels[i]
def colour(i): return np.stack([pixels[i]]*3, -1)
def get_digit(i): return digit[i]
tails = each(drop_last=[False, True])

class TwoHeads(nn.Module):
    "Two inputs, two predictions"
    def __init__(self):
        super().__init__()
        self.a,self.b,self.cls,self.reg = nn.Linear(6,5),nn.Linear(4,5),nn.Linear(5,3),nn.Linear(5,2)
    def forward(self, a, b):
        h = torch.tanh(self.a(a)+self.b(b))
        return self.cls(h),self.reg(h)

def two_losses(preds, c, r): return F.cross_entropy(preds[0], c) + 2*F.mse_loss(preds[1], r)
def two_losses_by_samples(preds, c, r):
    return F.cross_entropy(preds[0], c, ignore_index=0, reduction='sum')/len(c) + 2*F.mse_loss(preds[1], r)

@app('two inputs, two targets',
     note='The loss is the sum of two losses. If one of them ignores targets, let it divide by the samples: '
          '`reduction="sum"` and `/len(y)`.')
@each(loss_func=[two_losses, two_losses_by_samples])
def test_two_inputs_two_targets(loss_func, works):
    a,b,r = features(N+VALID).float(),features(N+VALID, 4, 1).float(),features(N+VALID, 2, 2).float()
    c = classes(N+VALID)
    def make(bs):
        dls = loaders(bs, [TransformBlock]*4, [a.__getitem__, b.__getitem__, c.__getitem__, r.__getitem__], n_inp=2)
        return Learner(dls, TwoHeads(), loss_func)
    works(*both(make))

@app('tabular, regression',
     note='Embeddings and continuous columns. `use_bn=False, bn_cont=False`, because batch norm would see '
          'micro-batches.')
@tails
def test_tabular_learner(drop_last, works):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(c1=rng.choice(list('abc'), N+VALID), c2=rng.integers(0, 9, N+VALID),
                           x1=rng.normal(size=N+VALID), x2=rng.normal(size=N+VALID)))
    df['y'] = df.x1*(df.c1=='a') + df.c2/5 + rng.normal(size=N+VALID)/9
    df.loc[::7, 'x2'] = np.nan
    def make(bs):
        to = TabularPandas(df, [Categorify, FillMissing, Normalize], ['c1','c2'], ['x1','x2'], 'y', RegressionBlock(),
                           IndexSplitter(range(N, N+VALID))(df))
        dls = to.dataloaders(bs=bs, val_bs=VALID, drop_last=drop_last, device=CPU)
        return tabular_learner(dls, [20,10], config=tabular_config(use_bn=False, bn_cont=False), loss_func=nn.MSELoss(),
                               wd=.1)
    works(*both(make))

def flat_mse(pred, y): return F.mse_loss(pred, y.flatten())

@app('collaborative filtering', note='`EmbeddingDotBias` with `y_range` and weight decay.')
def test_collab(works):
    rng = np.random.default_rng(0)
    df = pd.DataFrame(dict(user=rng.integers(0, 12, 100), item=rng.integers(0, 15, 100),
                           rating=rng.integers(1, 6, 100).astype(float)))
    def make(bs):
        # 73 ratings in training
        dls = CollabDataLoaders.from_df(df, .27, seed=0, bs=bs, val_bs=VALID, drop_last=False, device=CPU)
        return collab_learner(dls, 5, y_range=(.5,5.5), loss_func=flat_mse, wd=.1)
    works(*both(make))

def facts(i):
    return [k for k,v in dict(even=digit[i]%2==0, big=digit[i]>6, prime=digit[i] in (2,3,5,7),
                              round=digit[i] in (0,6,8,9)).items() if v]
def multilayer(n_in, n_out): return nn.Sequential(nn.Flatten(), nn.Linear(n_in, 10), nn.Tanh(), nn.Linear(10, n_out))

@app('multi-label classification', note='`MultiCategoryBlock` and `BCEWithLogitsLoss`, with and without `pos_weight`.')
@each(pos_weight=[None, tensor([1.,5.,2.,.5]).double()])
def test_multi_label(pos_weight, works):
    def make(bs):
        dls = loaders(bs, (ImageBlock(PILImageBW), MultiCategoryBlock), [grey, facts])
        return Learner(dls, multilayer(64, 4), nn.BCEWithLogitsLoss(pos_weight=pos_weight))
    works(*both(make))

def void_mask(i):
    "1 for ink, 0 for paper and 255, to be ignored, for what lies between"
    return np.where(pixels[i]>150, 1, np.where(pixels[i]<30, 0, 255)).astype(np.uint8)

@app('segmentation',
     note='`DynamicUnet` on two convolutions. Group norm replaces its batch norm, and `ignore_index` leaves out '
          'void pixels.')
def test_unet_with_group_norm(works):
    def make(bs):
        dls = loaders(bs, (ImageBlock(PILImageBW), MaskBlock(['paper','ink'])), [grey, void_mask])
        encoder = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU())
        unet = recipe('tutorials/keep_batch_norm.ipynb', 'to_group_norm')(DynamicUnet(encoder, 2, (8,8)))
        # the last one turns the predictions into a `TensorBase`, and float64 into float32
        unet.layers = unet.layers[:-1]
        return Learner(dls, unet, nn.CrossEntropyLoss(ignore_index=255))
    works(*both(make))

@app('vision, from scratch',
     note='A residual network with group norm (`norm_layer`), because batch norm would see micro-batches.')
def test_group_norm(works):
    def make(bs):
        dls = loaders(bs, (ImageBlock(PILImageBW), CategoryBlock), [grey, get_digit])
        net = ResNet(BasicBlock, [1,1,1,1], num_classes=10, norm_layer=partial(nn.GroupNorm, 8))
        net.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
        return Learner(dls, net, nn.CrossEntropyLoss())
    works(*both(make, lambda learn: learn.fit_one_cycle(1, .002)))

def frozen_then_all(learn):
    learn.freeze()
    learn.fit_one_cycle(1, .01)
    learn.unfreeze()
    learn.fit_one_cycle(1, slice(1e-5, 1e-3))

@app('vision, transfer learning',
     note='`vision_learner`, not pretrained, with `BatchNormEval` and a head without batch norm. '
     'First frozen, then unfrozen with `slice` learning rates.')
def test_transfer(works):
    def make(bs):
        dls = loaders(bs, (ImageBlock, CategoryBlock), [colour, get_digit], item_tfms=Resize(16))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 20), nn.ReLU(), nn.Linear(20, 10))
        return vision_learner(dls, resnet18, pretrained=False, custom_head=head, loss_func=nn.CrossEntropyLoss(),
                              cbs=BatchNormEval(),
                              opt_func=SGD)   # its state is half as large as Adam's
    works(*both(make, frozen_then_all))

def by_image(k, x): return (x*255).round().sum((1,2,3)).remainder(k)

@app('batch transforms',
     note='`Flip` and `Rotate`, which depend only on the image here. Usually they are drawn at random for each '
          'micro-batch: '
     'you get other draws, with the same distribution.')
def test_batch_transforms(works):
    tfms = [Flip(p=1., draw=lambda x: by_image(2, x)), Rotate(p=1., draw=lambda x: by_image(41, x)-20)]
    def make(bs):
        dls = loaders(bs, (ImageBlock(PILImageBW), CategoryBlock), [grey, get_digit], batch_tfms=tfms)
        return Learner(dls, multilayer(64, 10), nn.CrossEntropyLoss())
    works(*both(make))

class DropoutBySample(nn.Dropout):
    "Dropout that draws one mask for each sample, and looks it up"
    def __init__(self, p, n, d):
        super().__init__(p)
        self.masks = torch.rand(n, d, generator=torch.Generator().manual_seed(0)) > p
    def forward(self, x, i): return x*self.masks[i]/(1-self.p) if self.training else x

class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.first,self.drop,self.last = nn.Linear(6, 20),DropoutBySample(.4, N+VALID, 20),nn.Linear(20, 3)
    def forward(self, x, i): return self.last(self.drop(torch.tanh(self.first(x)), i))

@app('dropout',
     note='The masks depend only on the sample here. Usually they are drawn at random for each micro-batch: you get '
          'other '
     'masks, with the same distribution.')
def test_dropout(works):
    x,y = features(N+VALID).float(),classes(N+VALID)
    def make(bs):
        return Learner(loaders(bs, [TransformBlock]*3, [x.__getitem__, noop, y.__getitem__], n_inp=2), WithDropout(),
                       nn.CrossEntropyLoss())
    works(*both(make))

def texts(n=N+VALID, vocab=40, longest=30):
    "Token ids of texts of very different lengths"
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.integers(5, vocab, 3 + int(rng.exponential(6)) % (longest-3))) for _ in range(n)]

def collate(items):
    """What many tutorials do: a dictionary, padded to the longest of the batch; labels of a token each are -100
    where padded"""
    ids,ys = zip(*items)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    masks = [torch.ones_like(o) for o in ids]
    y = pad(ys, padding_value=-100) if ys[0].ndim else torch.stack(ys)
    return dict(input_ids=pad(ids), attention_mask=pad(masks)),y

class Unpack(Callback):
    """From a dictionary to the arguments of a transformer, and from its output to logits that `nn.CrossEntropyLoss`
    takes"""
    def before_batch(self): self.learn.xb = self.xb[0]['input_ids'],self.xb[0]['attention_mask']
    def after_pred(self):   self.learn.pred = self.pred.logits if self.y.ndim==1 else self.pred.logits.transpose(1, 2)

class OwnLoss(nn.Module):
    "A transformer that is given its labels"
    def __init__(self, model): super().__init__(); self.model = model
    def forward(self, batch, labels): return self.model(**batch, labels=labels)

class GiveLabels(Callback):
    def before_batch(self): self.learn.xb = *self.xb,self.y

def own_loss(out, y): return out.loss
def n_labels(out, y): return (y!=-100).sum()

def labels(x, head):
    "One for a text, or one for a token: of all, or of some that were masked"
    if head=='SequenceClassification': return (x.sum()%3).long()
    return x%3 if head=='TokenClassification' else torch.where(x%5==0, x, -100)

def bert(head):
    transformers = pytest.importorskip('transformers', reason='trains a model of transformers, which is not installed')
    config = transformers.BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                                     intermediate_size=12, num_labels=3,
                                     max_position_embeddings=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    model = getattr(transformers, f'BertFor{head}')(config)
    # softmax does not see the bias of the keys: its gradient is zero, of which only rounding would be compared
    for k,p in model.named_parameters():
        if k.endswith('key.bias'): p.requires_grad_(False)
    return model

def text_loaders(bs, head):
    items = [(x, labels(x, head)) for x in texts()]
    dl = partial(DataLoader, create_batch=collate)
    return DataLoaders(dl(items[:N], bs=bs, shuffle=True), dl(items[N:], bs=VALID), device=CPU)

# a micro-batch of one text can be without any label, and weighs 0
token_heads = pytest.mark.parametrize('head,bs,n_step',
                                      [('TokenClassification', 8, 4), ('MaskedLM', 8, 4), ('MaskedLM', 1, 16)])

@app('transformers, classification',
     note='A callback gives the model its dictionaries and takes `.logits` from its output. Each batch is padded to '
          'its longest text.')
def test_sequence_classification(works):
    head = 'SequenceClassification'
    works(*both(lambda bs: Learner(text_loaders(bs, head), bert(head), nn.CrossEntropyLoss(), cbs=Unpack())))

@app('transformers, one label per token',
     note='Token classification and masked language modelling. The label is -100 where there is none.')
@token_heads
def test_token_labels(head, bs, n_step, works):
    works(*both(lambda bs: Learner(text_loaders(bs, head), bert(head), nn.CrossEntropyLoss(), cbs=Unpack()), bs=bs,
                n_step=n_step))

@app('transformers, `output.loss`',
     note='Give `weight=lambda out, y: (y!=-100).sum()`, because a loss that the model computes does not say what its '
          'mean divides by.')
@token_heads
def test_own_loss(head, bs, n_step, works):
    works(*both(lambda bs: Learner(text_loaders(bs, head), OwnLoss(bert(head)), own_loss, cbs=GiveLabels()), bs=bs,
                n_step=n_step, weight=n_labels))

class TokenLoss(nn.CrossEntropyLoss):
    def forward(self, pred, y): return super().forward(pred.flatten(0,1), y.flatten())

# so small that no weight is dropped; of 0 recent PyTorch returns the parameter itself, which `WeightDropout` cannot
# take
no_dropout = dict(hidden_p=0., input_p=0., embed_p=0., weight_p=1e-20, output_p=0.)
lm_config = dict(emb_sz=6, n_hid=10, n_layers=2, pad_token=1, bidir=False, tie_weights=True, out_bias=True,
                 **no_dropout)
def small_lm(): return get_language_model(AWD_LSTM, 40, lm_config).double()

def lm_by_hand(model, batches, n_step, n_epoch, lr):
    """Windows of the same streams in plain PyTorch: the tokens' losses summed and divided by the tokens of the
    window. Returns the loss of each step"""
    opt,losses = torch.optim.AdamW(model.parameters(), lr),[]
    for _ in range(n_epoch):
        model.reset()
        for i in range(0, len(batches), n_step):
            window = batches[i:i+n_step]
            n = sum(y.numel() for _,y in window)
            ls = [F.cross_entropy(model(x)[0].flatten(0,1), y.flatten(), reduction='sum')/n for x,y in window]
            sum(ls).backward()
            opt.step(); opt.zero_grad()
            losses.append(sum(ls).item())
    return losses

@app('language model',
     compared='the weights and the loss of each step, with a loop in plain PyTorch over the same batches',
     note='AWD-LSTM carries its state from batch to batch, and the last batch is short. '
     'We compare with a loop, because a loader with a larger batch size cuts the text into other streams.')
def test_stream_of_texts(works):
    dl = LMDataLoader(texts(n=89), bs=8, seq_len=10)
    n_tokens = [y.numel() for _,y in dl]
    is_short = len(n_tokens)%4>1 and 0<n_tokens[-1]<n_tokens[0]
    assert is_short, f'the tail is to end with a short micro-batch, got tokens {n_tokens}'
    set_seed(0)
    a,b = small_lm(),small_lm()
    b.load_state_dict(a.state_dict())
    learn = Learner(DataLoaders(dl, dl, device=CPU), a, TokenLoss(),
                    opt_func=partial(OptimWrapper, opt=torch.optim.AdamW), cbs=rnn_cbs())
    learn = ready(learn, [AccumulateStep(4)])
    learn.recorder.smooth_loss.beta = 0   # records losses as they are
    learn.fit(2, .01)
    losses = lm_by_hand(b, list(dl), 4, 2, .01)
    works.same(learn.recorder.losses, losses, 'losses')
    works.same(list(a.parameters()), list(b.parameters()), 'weights')

def pad_even(samples, seq_len=4):
    "Pad as fastai's `pad_input_chunk` does, but to a multiple of `seq_len`"
    n = math.ceil(max(len(x) for x,_ in samples)/seq_len)*seq_len
    return [(pad_chunk(x, seq_len=seq_len, pad_len=n),y) for x,y in samples]

def text_classifier(bs, pad=pad_even):
    items = [(x, (x==7).any().long()) for x in texts()]
    dl = partial(SortedDL, sort_func=lambda o: len(o[0]), before_batch=pad)
    dls = DataLoaders(dl(items[:N], bs=bs), dl(items[N:], bs=VALID), device=CPU)
    model = get_text_classifier(AWD_LSTM, 40, 2, seq_len=4, config=dict(emb_sz=6, n_hid=10, n_layers=2, **no_dropout),
                                ps=[0.], lin_ftrs=[8])
    for o in model[1].layers: o[0] = nn.LayerNorm(o[0].num_features)
    return Learner(dls, model, nn.CrossEntropyLoss(), cbs=rnn_cbs())

@app('text classification',
     note='AWD-LSTM with layer norm instead of batch norm in its head. Batches are sorted by length and padded to a '
          'multiple of `seq_len`. '
     'With the padding of fastai, the prediction for a text depends on the other texts of its batch. When `SortedDL` '
     'shuffles, another batch size gives other batches.')
def test_text_classification(works): works(*both(text_classifier))

def fooled(fake_pred, output, target): return F.softplus(-fake_pred).mean()
def told_apart(real_pred, fake_pred): return (F.softplus(-real_pred)+.5*F.softplus(fake_pred)).mean()

class Modes(Callback):
    "Which network each window has trained"
    def before_fit(self): self.windows = [[]]
    def before_batch(self):
        if self.training: self.windows[-1].append(self.learn.gan_trainer.gen_mode)
    def after_step(self): self.windows.append([])

def gan(switcher, bs, cbs=None):
    noise,real = features(N+VALID, 4).float(),features(N+VALID, 5, 1).float()
    learn = GANLearner(loaders(bs, [TransformBlock]*2, [noise.__getitem__, real.__getitem__]), small_model(4, 5, 0),
                       small_model(5, 1, 1), fooled, told_apart,
                       switcher=switcher, switch_eval=False, cbs=[Modes(),*L(cbs)])
    learn.gan_trainer.gen_loss,learn.gan_trainer.crit_loss = AvgSmoothLoss64(),AvgSmoothLoss64()
    learn.metrics = learn.metrics[:1]   # in validation `crit_loss` is that of the last micro-batch of training
    return learn

@app('GAN',
     note='The switchers of fastai switch after whole windows. The metric `crit_loss` and the smoothed losses of '
          '`GANTrainer` '
     'are those of micro-batches, so we do not compare them.')
@pytest.mark.parametrize('switcher', [partial(FixedGANSwitcher, 2, 1), partial(AdaptiveGANSwitcher, .7, 1.)])
def test_gan(switcher, works):
    a,b = both(lambda bs: gan(switcher(), bs))
    assert {True,False}=={o[0] for o in b.modes.windows
                          if o}, f'one of the networks was never trained: {b.modes.windows}'
    assert all(len(set(o))<2 for o in a.modes.windows), f'a window has trained both: {a.modes.windows}'
    works(a, b)

class StepCritic(Callback):
    "A second optimizer, for the critic in the model, that steps in `after_batch`"
    def before_fit(self): self.critic_opt = torch.optim.Adam(self.model.critic.parameters(), .01)
    def after_batch(self):
        if not self.training: return
        self.critic_opt.step()
        self.critic_opt.zero_grad()

class WithCritic(nn.Module):
    "A classifier, and a critic that guesses where it is right"
    def __init__(self): super().__init__(); self.body,self.critic = small_model(),small_model(3, 1, 1)
    def forward(self, x):
        pred = self.body(x)
        return pred,self.critic(pred.detach())[:,0]

def both_losses(preds, y):
    right = (preds[0].argmax(1)==y).double()
    return F.cross_entropy(preds[0], y) + F.binary_cross_entropy_with_logits(preds[1], right)

@app('a second optimizer by hand', note='A callback steps it in `after_batch`. Its parameters belong to the model.')
@tails
def test_second_optimizer(drop_last, works):
    a,b = pair(StepCritic, n=N, model=WithCritic, loss_func=both_losses, splitter=lambda m: [params(m.body)],
               drop_last=drop_last)
    works(a, b)
    works.same(*[list(o.step_critic.critic_opt.state.values()) for o in (a,b)], 'critic_opt')
