//! The digits, read row by row by a small recurrent network, and the settings of a worker.

#![allow(dead_code, reason = "each program uses a part")]

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::gru::{Gru, GruConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use pushpull::training::TrainingConfig;
use pushpull::{ClusterSpec, TaskId, WorkerConfig};

const SIDE: usize = 8;
const HIDDEN: usize = 32;
const CLASSES: usize = 10;
const PIXEL_MAX: f32 = 16.0;

/// The rows of a batch.
pub(crate) const BATCH: usize = 32;

/// A handwritten digit of 8 x 8 pixels.
#[derive(Clone, Debug)]
pub(crate) struct Digit {
    pixels: [f32; SIDE * SIDE],
    label: i64,
}

/// The 1,797 digits that the crate smartcore contains: those to learn from, or every fifth, which
/// is held out.
pub(crate) fn digits(is_held_out: bool) -> Vec<Digit> {
    let digits = smartcore::dataset::digits::load_dataset();
    let images = digits.data.chunks(SIDE * SIDE).zip(&digits.target).enumerate();
    let part = images.filter(|(index, _)| (index % 5 == 4) == is_held_out);
    part.map(|(_, (pixels, &label))| Digit {
        pixels: std::array::from_fn(|pixel| pixels[pixel] / PIXEL_MAX),
        label: label as i64,
    })
    .collect()
}

/// Images of a batch, one row of pixels after another, and their classes.
#[derive(Clone, Debug)]
pub(crate) struct DigitBatch {
    pub(crate) rows: Tensor<3>,
    pub(crate) labels: Tensor<1, Int>,
}

#[derive(Clone)]
pub(crate) struct DigitBatcher;

impl Batcher<Digit, DigitBatch> for DigitBatcher {
    fn batch(&self, digits: Vec<Digit>, device: &Device) -> DigitBatch {
        let pixels: Vec<f32> = digits.iter().flat_map(|digit| digit.pixels).collect();
        let labels: Vec<i64> = digits.iter().map(|digit| digit.label).collect();
        let rows = TensorData::new(pixels, [digits.len(), SIDE, SIDE]);
        let labels = TensorData::new(labels, [digits.len()]);
        DigitBatch {
            rows: Tensor::from_data(rows, device),
            labels: Tensor::from_data(labels, device),
        }
    }
}

/// Returns batches in an order that the worker's index decides.
pub(crate) fn loader(is_held_out: bool) -> Arc<dyn DataLoader<DigitBatch>> {
    let index = std::env::args().nth(2).and_then(|index| index.parse().ok());
    batches(is_held_out, BATCH, index.unwrap_or(0))
}

/// Returns batches in an order that the seed decides.
pub(crate) fn batches(
    is_held_out: bool,
    size: usize,
    seed: u64,
) -> Arc<dyn DataLoader<DigitBatch>> {
    let set = InMemDataset::new(digits(is_held_out));
    DataLoaderBuilder::new(DigitBatcher).batch_size(size).shuffle(seed).build(set)
}

/// A recurrent layer, and a linear one of its last state.
#[derive(Module, Debug)]
pub(crate) struct DigitNetwork {
    rows: Gru,
    last: Linear,
}

impl DigitNetwork {
    pub(crate) fn new(device: &Device) -> DigitNetwork {
        DigitNetwork {
            rows: GruConfig::new(SIDE, HIDDEN, true).init(device),
            last: LinearConfig::new(HIDDEN, CLASSES).init(device),
        }
    }

    pub(crate) fn forward(&self, batch: DigitBatch) -> ClassificationOutput {
        let DigitBatch { rows, labels } = batch;
        let states = self.rows.forward(rows, None);
        let count = states.dims()[0];
        let last = states.slice([0..count, SIDE - 1..SIDE]).reshape([count, HIDDEN]);
        let output = self.last.forward(last);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), labels.clone());
        ClassificationOutput::new(loss, output, labels)
    }

    /// Returns the share of held-out digits that are classified correctly.
    pub(crate) fn accuracy(&self, device: &Device) -> f32 {
        let batch = DigitBatcher.batch(digits(true), device);
        let ClassificationOutput { output, targets, .. } = self.forward(batch);
        let found = output.argmax(1).flatten::<1>(0, 1);
        found.equal(targets).float().mean().into_scalar()
    }
}

impl TrainStep for DigitNetwork {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> TrainOutput<ClassificationOutput> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for DigitNetwork {
    type Input = DigitBatch;
    type Output = ClassificationOutput;

    fn step(&self, batch: DigitBatch) -> ClassificationOutput {
        self.forward(batch)
    }
}

/// Returns the settings of the worker that the arguments name: the cluster, and the index of its
/// task.
pub(crate) fn training() -> Result<TrainingConfig, Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let cluster: ClusterSpec = arguments.next().ok_or("the cluster is missing")?.parse()?;
    let index = arguments.next().ok_or("the index of the worker is missing")?.parse()?;
    Ok(TrainingConfig::new(WorkerConfig::new(cluster, TaskId::worker(index))))
}
