//! `pushpull devices`: prints the devices of this machine as lines or as JSON.

use std::error::Error;

use clap::Args;
use pushpull::compute::{ComputeError, DeviceInfo, cuda_devices, devices};
use serde_json::{Value, json};

use super::output::print_lines;

/// Options of `pushpull devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesOptions {
    /// Print one JSON array
    #[arg(long, help_heading = "Output")]
    json: bool,
}

pub(crate) fn run(options: &DevicesOptions) -> Result<(), Box<dyn Error>> {
    let devices = devices();
    match cuda_devices() {
        // Nobody expects CUDA of a program that was built without.
        Ok(_) | Err(ComputeError::WithoutCuda { .. }) => {}
        Err(reason) => eprintln!("pushpull: {reason}"),
    }
    let text = match options.json {
        true => Value::from(devices.iter().map(json_of).collect::<Vec<_>>()).to_string(),
        false => devices.iter().map(line_of).collect::<Vec<_>>().join("\n"),
    };
    Ok(print_lines(&text)?)
}

fn line_of(device: &DeviceInfo) -> String {
    let DeviceInfo { name, model, cores, memory_bytes, compute_capability, .. } = device;
    let memory = memory_bytes.map_or_else(
        || "unknown memory".to_owned(),
        |bytes| format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64),
    );
    let unit = if compute_capability.is_some() { "multiprocessor" } else { "core" };
    let plural = if *cores == 1 { "" } else { "s" };
    let capability = compute_capability.map_or_else(String::new, |(major, minor)| {
        format!(" (compute capability {major}.{minor})")
    });
    let cores = format!("{cores} {unit}{plural}");
    format!("{name:<8} {cores:<10} {memory:<16} {model}{capability}").trim_end().to_owned()
}

fn json_of(device: &DeviceInfo) -> Value {
    let DeviceInfo { name, model, cores, memory_bytes, compute_capability, .. } = device;
    let capability = compute_capability.map(|(major, minor)| format!("{major}.{minor}"));
    json!({
        "name": name,
        "model": model,
        "cores": cores,
        "memory_bytes": memory_bytes,
        "compute_capability": capability,
    })
}
