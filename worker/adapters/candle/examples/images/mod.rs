//! Images of one channel, a small convolutional network for them, and the settings of a worker.

#![allow(dead_code, reason = "each program uses a part")]

use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Conv2d, Conv2dConfig, Linear, Module, VarBuilder, conv2d, linear};
use pushpull::training::TrainingConfig;
use pushpull::training::data::{IdxSource, Source, SourceError};
use pushpull::{ClusterSpec, TaskId, WorkerConfig};

/// Classes of the images.
const CLASSES: usize = 10;

/// Images with their classes: those to learn from, and others that are held out.
pub(crate) struct ImageSet {
    train: (Tensor, Tensor),
    test: (Tensor, Tensor),
}

impl ImageSet {
    /// Reads Fashion-MNIST, 70,000 images of 28 x 28 pixels, from where Debian's package
    /// `dataset-fashion-mnist` puts it, or else the digits.
    pub(crate) fn load(
        device: &Device,
    ) -> std::result::Result<ImageSet, Box<dyn std::error::Error>> {
        let folder = Path::new("/usr/share/datasets/fashion-mnist");
        if !folder.exists() {
            println!("{} is not there: learning from digits", folder.display());
            return Ok(ImageSet::digits(device)?);
        }
        let part = |name: &str| -> std::result::Result<_, Box<dyn std::error::Error>> {
            let file = |what: &str| folder.join(format!("{name}-{what}-ubyte.gz"));
            let source = IdxSource::open(file("images-idx3"), file("labels-idx1"))?;
            let [height, width] = *source.shape() else { return Err("images have rows".into()) };
            let samples = (0..source.len()).map(|index| source.get(index));
            let samples = samples.collect::<std::result::Result<Vec<_>, SourceError>>()?;
            let labels: Vec<u32> = samples.iter().map(|(_, label)| u32::from(*label)).collect();
            let pixels = samples.iter().flat_map(|(pixels, _)| pixels.iter());
            let pixels: Vec<f32> = pixels.map(|&pixel| f32::from(pixel) / 255.0).collect();
            let count = labels.len();
            let images = Tensor::from_vec(pixels, (count, 1, height, width), device)?;
            Ok((images, Tensor::from_vec(labels, count, device)?))
        };
        Ok(ImageSet { train: part("train")?, test: part("t10k")? })
    }

    /// Returns the 1,797 handwritten digits of 8 x 8 pixels that the crate smartcore contains.
    /// Every fifth is held out.
    pub(crate) fn digits(device: &Device) -> Result<ImageSet> {
        let digits = smartcore::dataset::digits::load_dataset();
        let labels: Vec<u32> = digits.target.iter().map(|&label| label as u32).collect();
        let images = Tensor::from_vec(digits.data, (labels.len(), 1, 8, 8), device)?;
        let images = (images.to_dtype(DType::F32)? / 16.0)?;
        let labels = Tensor::from_vec(labels.clone(), labels.len(), device)?;
        let count = labels.dim(0)? as u32;
        let part = |is_test: bool| -> Result<(Tensor, Tensor)> {
            let rows: Vec<u32> = (0..count).filter(|row| (row % 5 == 4) == is_test).collect();
            let rows = Tensor::new(rows, device)?;
            Ok((images.index_select(&rows, 0)?, labels.index_select(&rows, 0)?))
        };
        Ok(ImageSet { train: part(false)?, test: part(true)? })
    }

    /// The pixels of a side.
    pub(crate) fn side(&self) -> Result<usize> {
        self.train.0.dim(2)
    }

    /// Returns the images and the classes of a step.
    pub(crate) fn batch(&self, step: u64, rows: usize) -> Result<(Tensor, Tensor)> {
        let count = self.train.1.dim(0)? as u64;
        let row = |n: u64| ((step * rows as u64 + n) * 769 % count) as u32;
        let rows: Vec<u32> = (0..rows as u64).map(row).collect();
        let rows = Tensor::new(rows, self.train.0.device())?;
        Ok((self.train.0.index_select(&rows, 0)?, self.train.1.index_select(&rows, 0)?))
    }
}

/// Two convolutions and a linear layer.
pub(crate) struct ImageNetwork {
    first: Conv2d,
    second: Conv2d,
    last: Linear,
}

impl ImageNetwork {
    /// Makes the network for images of this side with variables of a builder.
    pub(crate) fn new(side: usize, builder: VarBuilder<'_>) -> Result<ImageNetwork> {
        let config = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
        Ok(ImageNetwork {
            first: conv2d(1, 8, 3, config, builder.pp("first"))?,
            second: conv2d(8, 16, 3, config, builder.pp("second"))?,
            last: linear(16 * (side / 4) * (side / 4), CLASSES, builder.pp("last"))?,
        })
    }

    fn logits(&self, images: &Tensor) -> Result<Tensor> {
        let half = self.first.forward(images)?.relu()?.max_pool2d(2)?;
        let quarter = self.second.forward(&half)?.relu()?.max_pool2d(2)?;
        self.last.forward(&quarter.flatten_from(1)?)
    }

    /// Returns the mean cross entropy.
    pub(crate) fn loss(&self, images: &Tensor, labels: &Tensor) -> Result<Tensor> {
        candle_nn::loss::cross_entropy(&self.logits(images)?, labels)
    }

    /// Returns the share of held-out images that are classified correctly.
    pub(crate) fn accuracy(&self, images: &ImageSet) -> Result<f32> {
        let found = self.logits(&images.test.0)?.argmax(1)?;
        let correct = found.eq(&images.test.1)?.to_dtype(DType::F32)?;
        correct.mean_all()?.to_scalar::<f32>()
    }
}

/// Returns the number of a batch that no other worker computes at this step.
pub(crate) fn share(step: u64) -> std::result::Result<u64, Box<dyn std::error::Error>> {
    let (cluster, index) = task()?;
    let workers = cluster.tasks().filter(|(task, _)| &*task.job == "worker").count() as u64;
    Ok(step * workers + u64::from(index))
}

/// Returns the cluster and the index of the worker that the arguments name.
fn task() -> std::result::Result<(ClusterSpec, u32), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let cluster = arguments.next().ok_or("the cluster is missing")?.parse()?;
    let index = arguments.next().ok_or("the index of the worker is missing")?.parse()?;
    Ok((cluster, index))
}

/// Returns the settings of the worker that the arguments name: the cluster, and the index of its
/// task.
pub(crate) fn training() -> std::result::Result<TrainingConfig, Box<dyn std::error::Error>> {
    let (cluster, index) = task()?;
    Ok(TrainingConfig::new(WorkerConfig::new(cluster, TaskId::worker(index))))
}
