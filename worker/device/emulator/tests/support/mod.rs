//! A device for tests of the interpreter, without the driver.

#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

use std::collections::HashMap;

use pushpull_cuda_emulator::machine::{DeviceFault, DeviceFaultKind, GlobalMemory, Launch, run};
use pushpull_cuda_emulator::ptx::{Program, VariableSpace, link, parse};

/// A device with one module.
pub(crate) struct Bench {
    pub(crate) memory: GlobalMemory,
    pub(crate) addresses: HashMap<String, u64>,
    pub(crate) program: Program,
    launches: u64,
    /// The instructions that all launches have executed.
    pub(crate) steps: u64,
}

/// The value of a parameter.
pub(crate) trait KernelValue: Copy {
    fn bytes(self) -> Vec<u8>;
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! values {
    ($($of:ty)*) => { $(impl KernelValue for $of {
        fn bytes(self) -> Vec<u8> { self.to_le_bytes().to_vec() }
        fn read(bytes: &[u8]) -> $of { <$of>::from_le_bytes(bytes.try_into().unwrap()) }
    })* };
}
values!(u8 u16 u32 u64 i32 i64 f32 f64);

impl Bench {
    pub(crate) fn new(text: &str) -> Bench {
        let module = parse(text).unwrap_or_else(|error| panic!("{error}"));
        let mut memory = GlobalMemory::new(0x7_0000_0000);
        let mut addresses = HashMap::new();
        for variable in &module.variables {
            let constant = variable.space == VariableSpace::Constant;
            if constant || variable.space == VariableSpace::Global {
                let mut value = variable.initializer.clone().unwrap_or_default().bytes;
                value.resize(variable.size, 0);
                let address = memory.allocate_variable(&value, constant);
                addresses.insert(variable.name.clone(), address);
            }
        }
        let program = link(&module, &addresses).unwrap_or_else(|error| panic!("{error}"));
        Bench { memory, addresses, program, launches: 0, steps: 0 }
    }

    pub(crate) fn upload<T: KernelValue>(&mut self, values: &[T]) -> u64 {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.bytes()).collect();
        let address = self.memory.allocate(bytes.len());
        self.memory.copy_in(address, &bytes).unwrap();
        address
    }

    pub(crate) fn room<T>(&mut self, count: usize) -> u64 {
        self.memory.allocate(count * size_of::<T>())
    }

    pub(crate) fn download<T: KernelValue>(&mut self, address: u64, count: usize) -> Vec<T> {
        let mut bytes = vec![0; count * size_of::<T>()];
        self.memory.copy_out(address, &mut bytes).unwrap_or_else(|fault| panic!("{fault}"));
        bytes.chunks(size_of::<T>()).map(T::read).collect()
    }

    /// Launches blocks in x and y.
    pub(crate) fn launch(
        &mut self,
        kernel: &str,
        (grid, block): ([u32; 2], [u32; 2]),
        dynamic_shared: usize,
        arguments: &[Vec<u8>],
    ) -> Result<(), Box<DeviceFault>> {
        let kernel = &self.program.kernels[kernel];
        assert_eq!(kernel.parameters.len(), arguments.len());
        let end = kernel.parameters.last().map_or(0, |last| last.offset + last.size);
        let mut parameters = vec![0; end];
        for (place, argument) in kernel.parameters.iter().zip(arguments) {
            assert_eq!(place.size, argument.len());
            parameters[place.offset..place.offset + place.size].copy_from_slice(argument);
        }
        self.launches += 1;
        let launch = Launch {
            program: &self.program,
            kernel,
            grid: [grid[0], grid[1], 1],
            block: [block[0], block[1], 1],
            dynamic_shared,
            parameters: &parameters,
            number: self.launches,
            steps_max: 50_000_000,
        };
        launch.check().unwrap();
        self.steps += run(&launch, &mut self.memory)?;
        Ok(())
    }

    /// Launches one block of threads in x that must have a fault.
    pub(crate) fn fault(
        &mut self,
        kernel: &str,
        threads: u32,
        arguments: &[Vec<u8>],
    ) -> DeviceFaultKind {
        let fault = self.launch(kernel, ([1, 1], [threads, 1]), 0, arguments).unwrap_err();
        assert_eq!(fault.location.as_ref().unwrap().kernel, kernel);
        fault.kind
    }
}

pub(crate) const CORRECT: &str = include_str!("../kernels/correct.ptx");
pub(crate) const FAULTY: &str = include_str!("../kernels/faulty.ptx");

/// The bytes of the arguments of a launch.
#[macro_export]
macro_rules! arguments {
    ($($value:expr),*) => { &[$($crate::support::KernelValue::bytes($value)),*] };
}
