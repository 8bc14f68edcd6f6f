//! Runs the blocks of a launch.

use std::fmt;

use super::block;
use super::execute::Environment;
use super::fault::{DeviceFault, DeviceFaultKind, FaultLocation};
use super::memory::{GlobalMemory, RaceShadow, Region};
use super::thread::{LaunchGeometry, Thread};
use crate::ptx::{Kernel, Program, Space};

/// A launch of a kernel.
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// The linked module.
    pub program: &'a Program,
    /// The kernel of it.
    pub kernel: &'a Kernel,
    /// The blocks along each axis.
    pub grid: [u32; 3],
    /// The threads of a block along each axis.
    pub block: [u32; 3],
    /// The bytes of dynamic shared memory.
    pub dynamic_shared: usize,
    /// The values of the parameters at their offsets.
    pub parameters: &'a [u8],
    /// A number that no other launch over the same memory has.
    pub number: u64,
    /// The most instructions that all threads may execute together.
    pub steps_max: u64,
}

/// The limits of a device on launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields say it")]
pub struct Limits {
    pub threads_per_block_max: u32,
    pub block_max: [u32; 3],
    pub grid_max: [u32; 3],
    pub shared_bytes_max: usize,
}

/// The limits of every device of compute capability 7.0 and later.
pub const LIMITS: Limits = Limits {
    threads_per_block_max: 1024,
    block_max: [1024, 1024, 64],
    grid_max: [0x7fff_ffff, 65_535, 65_535],
    shared_bytes_max: 48 * 1024,
};

/// Why a launch is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchError(pub String);

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl std::error::Error for LaunchError {}

impl Launch<'_> {
    /// Checks the launch against the limits of the device and the kernel.
    ///
    /// # Errors
    ///
    /// Fails with the limit that is exceeded.
    pub fn check(&self) -> Result<(), LaunchError> {
        let threads: u64 = self.block.iter().map(|&n| u64::from(n)).product();
        let shared = self.kernel.shared_size() + self.dynamic_shared;
        let all = |size: [u32; 3], most: [u32; 3]| {
            size.iter().zip(most).all(|(&size, most)| (1..=most).contains(&size))
        };
        let most = self.kernel.threads_max.unwrap_or(u32::MAX).min(LIMITS.threads_per_block_max);
        let message = if !all(self.grid, LIMITS.grid_max) {
            format!("grid of {:?} blocks", self.grid)
        } else if !all(self.block, LIMITS.block_max) || threads > u64::from(most) {
            format!("block of {:?} threads", self.block)
        } else if shared > LIMITS.shared_bytes_max {
            format!("{shared} bytes of shared memory")
        } else {
            return Ok(());
        };
        Err(LaunchError(format!("kernel {}: {message}", self.kernel.name)))
    }
}

/// Runs a launch that has been checked, and returns how many instructions were executed.
///
/// # Errors
///
/// Fails with the first fault. Writes before it have been done.
pub fn run(launch: &Launch<'_>, memory: &mut GlobalMemory) -> Result<u64, Box<DeviceFault>> {
    let Launch { program, kernel, grid, block: block_size, .. } = *launch;
    let code = &program.functions[kernel.function];
    let start = kernel.shared.dynamic_start();
    let mut shared = Region::new(Space::Shared, start + launch.dynamic_shared);
    for range in &kernel.shared.ranges {
        shared.map(range.clone());
    }
    shared.map(start..start + launch.dynamic_shared);
    let dynamic_shared = launch.dynamic_shared as u32;
    let mut environment = Environment {
        program,
        memory,
        shared,
        shared_races: RaceShadow::default(),
        geometry: LaunchGeometry { grid, block_size, block: [0; 3], dynamic_shared },
        block: 0,
        epoch: 0,
        launch: launch.number,
        steps_left: launch.steps_max,
        steps_max: launch.steps_max,
        hints: program.functions.iter().map(|code| vec![0; code.instructions.len()]).collect(),
    };
    let count: u32 = block_size.iter().product();
    let mut threads: Vec<Thread> = (0..count).map(|at| Thread::new(at, block_size)).collect();
    for z in 0..grid[2] {
        for y in 0..grid[1] {
            for x in 0..grid[0] {
                environment.geometry.block = [x, y, z];
                environment.block = x + grid[0] * (y + grid[1] * z);
                environment.epoch = 0;
                environment.shared.forget();
                for thread in &mut threads {
                    thread.start(kernel.function, code, launch.parameters, &environment.geometry);
                }
                block::run(&mut environment, &mut threads)
                    .map_err(|(at, kind)| fault(launch, &environment, &threads[at], kind))?;
            }
        }
    }
    Ok(launch.steps_max - environment.steps_left)
}

fn fault(
    launch: &Launch<'_>,
    environment: &Environment<'_>,
    thread: &Thread,
    kind: DeviceFaultKind,
) -> Box<DeviceFault> {
    let code = &launch.program.functions[thread.function];
    let line = code.instructions.get(thread.at).map_or(0, |instruction| instruction.line);
    let text = launch.program.lines.get((line as usize).saturating_sub(1));
    let location = FaultLocation {
        kernel: launch.kernel.name.clone(),
        block: environment.geometry.block,
        thread: thread.index,
        line,
        text: text.cloned().unwrap_or_default(),
    };
    Box::new(DeviceFault { kind, location: Some(location) })
}
