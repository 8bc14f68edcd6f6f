//! `pushpull devices`: prints the devices of this machine as lines or as JSON.

use std::error::Error;

use clap::Args;
use pushpull::compute::{DeviceInfo, devices};
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
    let text = match options.json {
        true => Value::from(devices.iter().map(json_of).collect::<Vec<_>>()).to_string(),
        false => devices.iter().map(line_of).collect::<Vec<_>>().join("\n"),
    };
    Ok(print_lines(&text)?)
}

fn line_of(device: &DeviceInfo) -> String {
    let DeviceInfo { name, model, cores, memory_bytes, .. } = device;
    let memory = memory_bytes.map_or_else(
        || "unknown memory".to_owned(),
        |bytes| format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64),
    );
    let cores = if *cores == 1 { "1 core".to_owned() } else { format!("{cores} cores") };
    format!("{name:<8} {cores:<10} {memory:<16} {model}").trim_end().to_owned()
}

fn json_of(device: &DeviceInfo) -> Value {
    let DeviceInfo { name, model, cores, memory_bytes, .. } = device;
    json!({ "name": name, "model": model, "cores": cores, "memory_bytes": memory_bytes })
}
