//! [`Device`]: the processor or a CUDA device, on which a worker computes.

use std::fmt;
#[cfg(feature = "cuda")]
use std::num::NonZeroU32;
use std::sync::Arc;

use crate::cpu::pool::ThreadPool;
#[cfg(feature = "cuda")]
use crate::cuda::cuda_device::CudaDevice;
#[cfg(feature = "cuda")]
use crate::cuda::cuda_memory::CudaMemory;
use crate::device_info::cores;
use crate::error::{ComputeError, check_length};
use crate::memory::{Buffer, BufferPlace, DeviceElement, Resident, View, ViewMut};

/// A compute device of a worker: the processor, with a number of threads, or a CUDA device.
///
/// A clone is the same device. Several threads may use one device at once; they share its threads,
/// or its queue. The results of a kernel do not depend on the number of threads.
#[derive(Clone, Debug)]
pub struct Device {
    backend: Backend,
}

/// The implementation of a device's kernels.
#[derive(Clone, Debug)]
pub(crate) enum Backend {
    Cpu(Arc<ThreadPool>),
    #[cfg(feature = "cuda")]
    Cuda(Arc<CudaDevice>),
}

impl Device {
    /// The most threads of a device on the processor.
    pub const THREADS_MAX: usize = 1024;

    /// Opens the processor with one thread for each core that this process may use, by its
    /// affinity and by the quota of its control group.
    ///
    /// # Errors
    /// [`ComputeError::Spawn`].
    pub fn cpu() -> Result<Device, ComputeError> {
        Device::cpu_threads(cores().min(Device::THREADS_MAX))
    }

    /// Opens the processor with this many threads, the caller's included.
    ///
    /// # Errors
    /// [`ComputeError::Threads`] and [`ComputeError::Spawn`].
    pub fn cpu_threads(threads: usize) -> Result<Device, ComputeError> {
        if !(1..=Device::THREADS_MAX).contains(&threads) {
            return Err(ComputeError::Threads { threads });
        }
        let pool = Arc::new(ThreadPool::start(threads)?);
        Ok(Device { backend: Backend::Cpu(pool) })
    }

    /// Opens the device of this name: `cpu`, `cpu:THREADS`, `cuda:INDEX`, or `auto` for the best
    /// device of the machine.
    ///
    /// ```
    /// # use pushpull_device::{ComputeError, Device};
    /// let device = Device::pick("cpu:2")?;
    /// assert_eq!(device.to_string(), "cpu:2");
    /// # Ok::<(), ComputeError>(())
    /// ```
    ///
    /// # Errors
    /// [`ComputeError::Name`], and the errors of [`Device::cpu_threads`] and [`Device::cuda`].
    pub fn pick(name: &str) -> Result<Device, ComputeError> {
        let unknown = || ComputeError::Name { name: name.to_owned() };
        match name.split_once(':') {
            None if name == "auto" => Ok(Device::auto()?.0),
            None if name == "cpu" => Device::cpu(),
            Some(("cpu", threads)) => {
                Device::cpu_threads(number(threads).ok_or_else(unknown)? as usize)
            }
            Some(("cuda", index)) => Device::cuda(number(index).ok_or_else(unknown)?),
            _ => Err(unknown()),
        }
    }

    /// Opens a CUDA device by its index among those that the process may use. The environment
    /// variable `CUDA_VISIBLE_DEVICES` limits them.
    ///
    /// The driver translates the kernels the first time, and keeps the result for later processes.
    ///
    /// # Errors
    /// [`ComputeError::WithoutCuda`] if this build has no support for CUDA;
    /// [`ComputeError::NoDriver`], [`ComputeError::DriverTooOld`] and
    /// [`ComputeError::DriverLacks`]; [`ComputeError::NoDevice`] and [`ComputeError::Capability`];
    /// [`ComputeError::Cuda`] if the driver fails.
    pub fn cuda(index: u32) -> Result<Device, ComputeError> {
        Device::cuda_within(index, u64::MAX)
    }

    /// Opens a CUDA device and limits the memory of its buffers to this many bytes. An allocation
    /// beyond the limit fails with [`ComputeError::MemoryLimit`]. See [`Device::cuda`] for the
    /// rest.
    pub fn cuda_within(index: u32, memory_bytes_max: u64) -> Result<Device, ComputeError> {
        #[cfg(feature = "cuda")]
        {
            let device = Arc::new(CudaDevice::open(index, memory_bytes_max, NonZeroU32::MAX)?);
            Ok(Device { backend: Backend::Cuda(device) })
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = memory_bytes_max;
            Err(ComputeError::WithoutCuda { index })
        }
    }

    /// Opens a CUDA device whose kernels have grids of at most this many blocks in each dimension.
    /// Every loop over a grid then makes further rounds on few elements. See [`Device::cuda`] for
    /// the rest.
    #[cfg(all(feature = "cuda", feature = "testing"))]
    pub fn cuda_with_blocks(index: u32, blocks_max: NonZeroU32) -> Result<Device, ComputeError> {
        let device = Arc::new(CudaDevice::open(index, u64::MAX, blocks_max)?);
        Ok(Device { backend: Backend::Cuda(device) })
    }

    /// Opens the first CUDA device. If that fails, opens the processor, and returns the error
    /// beside it.
    ///
    /// # Errors
    /// The errors of [`Device::cpu`].
    pub fn auto() -> Result<(Device, Option<ComputeError>), ComputeError> {
        match Device::cuda(0) {
            Ok(device) => Ok((device, None)),
            Err(reason) => Ok((Device::cpu()?, Some(reason))),
        }
    }

    /// Returns the number of threads of this process that compute a large operation, the caller's
    /// included.
    pub fn threads(&self) -> usize {
        match &self.backend {
            Backend::Cpu(pool) => pool.threads(),
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => 1,
        }
    }

    /// Returns whether this is a clone of `other`, so that each can use the memory of the other.
    pub fn is_same(&self, other: &Device) -> bool {
        match (&self.backend, &other.backend) {
            (Backend::Cpu(_), Backend::Cpu(_)) => true,
            #[cfg(feature = "cuda")]
            (Backend::Cuda(cuda), Backend::Cuda(other)) => Arc::ptr_eq(cuda, other),
            #[cfg(feature = "cuda")]
            _ => false,
        }
    }

    /// Returns whether the kernels of this device use the processor's memory, so that slices of it
    /// are views.
    pub fn uses_host_memory(&self) -> bool {
        match &self.backend {
            Backend::Cpu(_) => true,
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => false,
        }
    }

    /// Allocates memory for `length` elements, all zero.
    ///
    /// # Errors
    /// The errors of the device; none on the processor.
    pub fn buffer<T: DeviceElement>(&self, length: usize) -> Result<Buffer<T>, ComputeError> {
        match &self.backend {
            Backend::Cpu(_) => Ok(Buffer { place: BufferPlace::Host(vec![T::default(); length]) }),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                Ok(Buffer { place: BufferPlace::Cuda(CudaMemory::new(cuda, length)?) })
            }
        }
    }

    /// Returns `values` where the kernels of this device can read them: in place on the processor,
    /// otherwise as a copy in the memory of the device.
    ///
    /// # Errors
    /// The errors of [`Device::buffer`].
    pub fn resident<'a, T: DeviceElement>(
        &self,
        values: &'a [T],
    ) -> Result<Resident<'a, T>, ComputeError> {
        match &self.backend {
            Backend::Cpu(_) => Ok(Resident::Host(values)),
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => {
                let mut copy = self.buffer(values.len())?;
                self.write(values, &mut copy)?;
                Ok(Resident::Copy(copy))
            }
        }
    }

    /// Copies values of the processor's memory to the memory of this device.
    ///
    /// # Errors
    /// [`ComputeError::Length`] if the lengths differ; [`ComputeError::OtherMemory`].
    pub fn write<'a, T: DeviceElement>(
        &self,
        values: &[T],
        to: impl Into<ViewMut<'a, T>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "write";
        let to = to.into();
        check_length(NAME, "values", values.len(), to.len())?;
        match &self.backend {
            Backend::Cpu(_) => to.host(NAME, "the target")?.copy_from_slice(values),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => cuda.write(values, to.cuda(cuda, NAME, "the target")?)?,
        }
        Ok(())
    }

    /// Copies elements of the memory of this device to the processor's memory. Waits for the
    /// kernels that compute them.
    ///
    /// # Errors
    /// The errors of [`Device::write`], and of the kernels before.
    pub fn read<'a, T: DeviceElement>(
        &self,
        from: impl Into<View<'a, T>>,
        values: &mut [T],
    ) -> Result<(), ComputeError> {
        const NAME: &str = "read";
        let from = from.into();
        check_length(NAME, "values", values.len(), from.len())?;
        match &self.backend {
            Backend::Cpu(_) => values.copy_from_slice(from.host(NAME, "the source")?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => cuda.read(from.cuda(cuda, NAME, "the source")?, values)?,
        }
        Ok(())
    }

    /// Copies elements within the memory of this device.
    ///
    /// # Errors
    /// The errors of [`Device::write`].
    pub fn copy<'a, T: DeviceElement>(
        &self,
        from: impl Into<View<'a, T>>,
        to: impl Into<ViewMut<'a, T>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "copy";
        let from = from.into();
        let to = to.into();
        check_length(NAME, "the source", from.len(), to.len())?;
        match &self.backend {
            Backend::Cpu(_) => {
                to.host(NAME, "the target")?.copy_from_slice(from.host(NAME, "the source")?);
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                let from = from.cuda(cuda, NAME, "the source")?;
                cuda.copy(from, to.cuda(cuda, NAME, "the target")?)?;
            }
        }
        Ok(())
    }

    /// Sets all elements to zero.
    ///
    /// # Errors
    /// [`ComputeError::OtherMemory`].
    pub fn zero<'a, T: DeviceElement>(
        &self,
        values: impl Into<ViewMut<'a, T>>,
    ) -> Result<(), ComputeError> {
        const NAME: &str = "zero";
        match &self.backend {
            Backend::Cpu(_) => values.into().host(NAME, "values")?.fill(T::default()),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => {
                cuda.fill_bytes(0, values.into().cuda(cuda, NAME, "values")?)?;
            }
        }
        Ok(())
    }

    /// Waits for all queued work. The processor has none.
    ///
    /// # Errors
    /// The errors of the work.
    pub fn synchronize(&self) -> Result<(), ComputeError> {
        match &self.backend {
            Backend::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => cuda.synchronize(),
        }
    }

    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }
}

/// Writes the name by which [`Device::pick`] opens such a device.
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.backend {
            Backend::Cpu(pool) => write!(f, "cpu:{}", pool.threads()),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => write!(f, "cuda:{}", cuda.index()),
        }
    }
}

/// Parses decimal digits alone: no sign, no space.
fn number(digits: &str) -> Option<u32> {
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    digits.parse().ok().filter(|_| is_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices() {
        let name = |name: &str| Err(ComputeError::Name { name: name.to_owned() });
        let cases = [
            ("cpu:1", Ok("cpu:1".to_owned())),
            ("cpu:03", Ok("cpu:3".to_owned())),
            ("cpu:0", Err(ComputeError::Threads { threads: 0 })),
            ("cpu:1025", Err(ComputeError::Threads { threads: 1025 })),
            ("cpu:", name("cpu:")),
            ("cpu:+1", name("cpu:+1")),
            ("cpu: 1", name("cpu: 1")),
            ("cpu:4294967296", name("cpu:4294967296")),
            ("cuda", name("cuda")),
            ("cuda:x", name("cuda:x")),
            ("gpu:0", name("gpu:0")),
            ("", name("")),
            ("CPU", name("CPU")),
        ];
        for (text, expected) in cases {
            assert_eq!(Device::pick(text).map(|device| device.to_string()), expected, "{text}");
        }
        for text in ["cpu", "auto"] {
            assert_eq!(Device::pick(text).unwrap().threads(), cores());
        }
    }
}
