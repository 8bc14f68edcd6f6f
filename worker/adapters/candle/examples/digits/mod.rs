//! The digits, a small convolutional network for them, and the settings of a worker.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Conv2d, Conv2dConfig, Linear, Module, VarBuilder, conv2d, linear};
use pushpull::training::TrainingConfig;
use pushpull::{ClusterSpec, TaskId, WorkerConfig};

/// Classes of the digits.
const CLASSES: usize = 10;

/// The most that a pixel has.
const PIXEL_MAX: f64 = 16.0;

/// The 1,797 handwritten digits of 8 x 8 pixels that the crate smartcore contains. Every fifth is
/// held out.
pub(crate) struct Digits {
    train: (Tensor, Tensor),
    test: (Tensor, Tensor),
}

impl Digits {
    /// Reads them.
    pub(crate) fn load(device: &Device) -> Result<Digits> {
        let digits = smartcore::dataset::digits::load_dataset();
        let labels: Vec<u32> = digits.target.iter().map(|&label| label as u32).collect();
        let images = Tensor::from_vec(digits.data, (labels.len(), 1, 8, 8), device)?;
        let images = (images.to_dtype(DType::F32)? / PIXEL_MAX)?;
        let labels = Tensor::from_vec(labels.clone(), labels.len(), device)?;
        let count = labels.dim(0)? as u32;
        let part = |is_test: bool| -> Result<(Tensor, Tensor)> {
            let rows: Vec<u32> = (0..count).filter(|row| (row % 5 == 4) == is_test).collect();
            let rows = Tensor::new(rows, device)?;
            Ok((images.index_select(&rows, 0)?, labels.index_select(&rows, 0)?))
        };
        Ok(Digits { train: part(false)?, test: part(true)? })
    }

    /// Returns the images and the labels of a step.
    pub(crate) fn batch(&self, step: u64, rows: usize) -> Result<(Tensor, Tensor)> {
        let count = self.train.1.dim(0)? as u64;
        let row = |n: u64| ((step * rows as u64 + n) * 769 % count) as u32;
        let rows: Vec<u32> = (0..rows as u64).map(row).collect();
        let rows = Tensor::new(rows, self.train.0.device())?;
        Ok((self.train.0.index_select(&rows, 0)?, self.train.1.index_select(&rows, 0)?))
    }
}

/// Two convolutions and a linear layer.
pub(crate) struct Network {
    first: Conv2d,
    second: Conv2d,
    last: Linear,
}

impl Network {
    /// Makes the network with variables of a builder.
    pub(crate) fn new(builder: VarBuilder<'_>) -> Result<Network> {
        let config = Conv2dConfig { padding: 1, ..Conv2dConfig::default() };
        Ok(Network {
            first: conv2d(1, 8, 3, config, builder.pp("first"))?,
            second: conv2d(8, 16, 3, config, builder.pp("second"))?,
            last: linear(16 * 2 * 2, CLASSES, builder.pp("last"))?,
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

    /// Returns the share of held-out digits that are classified correctly.
    pub(crate) fn accuracy(&self, digits: &Digits) -> Result<f32> {
        let found = self.logits(&digits.test.0)?.argmax(1)?;
        let correct = found.eq(&digits.test.1)?.to_dtype(DType::F32)?;
        correct.mean_all()?.to_scalar::<f32>()
    }
}

/// Returns the number of a batch that no other worker computes at this step.
#[allow(dead_code, reason = "only one of the examples has servers")]
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
#[allow(dead_code, reason = "only one of the examples has servers")]
pub(crate) fn training() -> std::result::Result<TrainingConfig, Box<dyn std::error::Error>> {
    let (cluster, index) = task()?;
    Ok(TrainingConfig::new(WorkerConfig::new(cluster, TaskId::worker(index))))
}
