//! A convolutional network on Fashion-MNIST, or on digits where it is not, trained by candle in one
//! process.
//!
//! `cargo run --release --example single`

mod images;

use candle_core::{DType, Device};
use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
use images::{ImageNetwork, ImageSet};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let data = ImageSet::load(&Device::Cpu)?;
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let network = ImageNetwork::new(data.side()?, builder)?;
    let mut optimizer = AdamW::new_lr(variables.all_vars(), 0.003)?;
    for step in 0..600 {
        let (images, labels) = data.batch(step, 64)?;
        let loss = network.loss(&images, &labels)?;
        optimizer.backward_step(&loss)?;
    }
    println!("accuracy {:.4}", network.accuracy(&data)?);
    Ok(())
}
