//! A convolutional network on Fashion-MNIST, or on digits where it is not, trained by candle over
//! parameter servers.
//!
//! Start the servers with the rule and the number of steps, then each worker with its index:
//!
//! ```sh
//! pushpull-ps --ps-hosts 127.0.0.1:2222 --optimizer adam --learning-rate 0.003 --last-step 600 &
//! cargo run --release --example distributed "ps=127.0.0.1:2222;worker=a:1,b:1" 0 &
//! cargo run --release --example distributed "ps=127.0.0.1:2222;worker=a:1,b:1" 1
//! ```

mod images;

use candle_core::{DType, Device};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use images::{ImageNetwork, ImageSet};
use pushpull_candle::PushPull;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let data = ImageSet::load(&Device::Cpu)?;
    let variables = VarMap::new();
    let builder = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let network = ImageNetwork::new(data.side()?, builder)?;
    let mut optimizer = PushPull::from_varmap(&variables, images::training()?)?;
    while optimizer.ready()? {
        let (images, labels) = data.batch(images::share(optimizer.global_step())?, 64)?;
        let loss = network.loss(&images, &labels)?;
        optimizer.backward_step(&loss)?;
    }
    println!("accuracy {:.4}", network.accuracy(&data)?);
    Ok(())
}
