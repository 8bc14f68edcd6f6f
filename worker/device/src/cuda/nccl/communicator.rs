//! [`Nccl`]: a rank of a communicator, whose operations end under a deadline.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUstream;
use half::{bf16, f16};

use super::library::{
    Communicator, IN_PROGRESS, INTERNAL_ERROR, NcclId, NcclLibrary, SUCCESS, Settings,
};
use super::nccl_error::NcclError;
use crate::cuda::cuda_device::CudaDevice;
use crate::device::{Backend, Device};
use crate::error::{ComputeError, check_length};
use crate::memory::{DeviceElement, View, ViewMut};

/// An element that NCCL can reduce: every [`DeviceElement`].
pub trait NcclElement: DeviceElement {
    /// The code of the type, an `ncclDataType_t`.
    #[doc(hidden)]
    const CODE: i32;
}

impl NcclElement for u8 {
    const CODE: i32 = 1;
}
impl NcclElement for u32 {
    const CODE: i32 = 3;
}
impl NcclElement for i64 {
    const CODE: i32 = 4;
}
impl NcclElement for u64 {
    const CODE: i32 = 5;
}
impl NcclElement for f16 {
    const CODE: i32 = 6;
}
impl NcclElement for f32 {
    const CODE: i32 = 7;
}
impl NcclElement for f64 {
    const CODE: i32 = 8;
}
impl NcclElement for bf16 {
    const CODE: i32 = 9;
}

/// The way in which the values of all ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NcclReduction {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks; whole numbers are rounded towards zero.
    Mean,
    /// The product.
    Product,
    /// The least value.
    Minimum,
    /// The greatest value.
    Maximum,
}

impl NcclReduction {
    /// The code of the reduction, an `ncclRedOp_t`.
    fn code(self) -> c_int {
        match self {
            NcclReduction::Sum => 0,
            NcclReduction::Product => 1,
            NcclReduction::Maximum => 2,
            NcclReduction::Minimum => 3,
            NcclReduction::Mean => 4,
        }
    }
}

/// One rank of an NCCL communicator, on one CUDA device. Each rank has a device of its own.
///
/// All ranks call the same operations with the same lengths in the same order, as they do for MPI.
/// An operation waits for the work that is queued on the device before, and for all ranks. So ranks
/// of one process have a thread each.
///
/// # Errors
///
/// An operation that fails, or that takes longer than the timeout of the communicator, ends the
/// communicator: NCCL aborts what is under way, the values are undefined, and all later operations
/// return [`NcclError::Ended`]. A wrong argument ([`NcclError::Compute`] with a length or a device,
/// [`NcclError::Rank`]) is refused before any call, and ends nothing.
///
/// The drop of a healthy communicator waits at most five seconds for the other ranks to drop theirs.
pub struct Nccl {
    rank: u32,
    size: u32,
    timeout: Duration,
    device: Device,
    /// `None` once an operation has failed. Locked, because the library allows one caller at a
    /// time.
    communicator: Mutex<Option<OpenCommunicator>>,
}

impl Nccl {
    /// The time that an operation of a communicator from [`Nccl::join`] may take.
    pub const TIMEOUT: Duration = Duration::from_secs(60);

    /// Returns the major, minor and patch version of the library.
    ///
    /// # Errors
    /// [`NcclError::NotLoaded`] and [`NcclError::Lacks`] if there is no library that can be used.
    pub fn version() -> Result<(u32, u32, u32), NcclError> {
        let number = NcclLibrary::open()?.version()?;
        Ok((number / 10_000, number / 100 % 100, number % 100))
    }

    /// Makes the id of a new communicator, which serves one [`Nccl::join`] of each rank. This
    /// process must live until all ranks have joined: they meet at an address of it.
    ///
    /// # Errors
    /// [`NcclError::NotLoaded`] and [`NcclError::Lacks`]; [`NcclError::Failed`], for example if the
    /// machine has no network.
    pub fn new_id() -> Result<NcclId, NcclError> {
        NcclLibrary::open()?.unique_id()
    }

    /// Joins the communicator of this id as one of `size` ranks, with [`Nccl::TIMEOUT`]. Returns
    /// once all ranks have joined.
    ///
    /// # Errors
    /// Those of [`Nccl::join_within`].
    pub fn join(device: &Device, id: &NcclId, rank: u32, size: u32) -> Result<Nccl, NcclError> {
        Nccl::join_within(device, id, rank, size, Nccl::TIMEOUT)
    }

    /// Joins the communicator of this id. Each operation, the join included, may take `timeout`.
    /// See [`Nccl::join`] for the rest.
    ///
    /// NCCL's variable `NCCL_COMM_BLOCKING=1` makes its calls wait without a deadline.
    ///
    /// # Errors
    /// [`NcclError::Size`], [`NcclError::Rank`] and [`NcclError::NotCuda`], before any call;
    /// [`NcclError::NotLoaded`] and [`NcclError::Lacks`]; [`NcclError::Failed`],
    /// [`NcclError::Timeout`] and [`NcclError::Compute`].
    pub fn join_within(
        device: &Device,
        id: &NcclId,
        rank: u32,
        size: u32,
        timeout: Duration,
    ) -> Result<Nccl, NcclError> {
        let count = c_int::try_from(size).ok().filter(|&count| count > 0);
        let count = count.ok_or(NcclError::Size { size })?;
        check_rank(rank, size)?;
        let Backend::Cuda(cuda) = device.backend() else {
            return Err(NcclError::NotCuda { device: device.to_string() });
        };
        let library = NcclLibrary::open()?;
        let communicator = OpenCommunicator {
            library,
            device: cuda.clone(),
            pointer: Box::new(AtomicPtr::new(std::ptr::null_mut())),
        };
        communicator.join(id, rank as c_int, count, timeout)?;
        let communicator = Mutex::new(Some(communicator));
        Ok(Nccl { rank, size, timeout, device: device.clone(), communicator })
    }

    /// Returns the rank of this process or thread, counted from 0.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns the device whose memory the operations use.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Reduces the values of all ranks, element by element, and writes the result to `values` of
    /// every rank.
    ///
    /// # Errors
    /// [`ComputeError::OtherMemory`] in [`NcclError::Compute`] for memory of another device; the
    /// errors of the type for the rest.
    pub fn all_reduce<'a, T: NcclElement>(
        &self,
        values: impl Into<ViewMut<'a, T>>,
        reduction: NcclReduction,
    ) -> Result<(), NcclError> {
        const NAME: &str = "all_reduce";
        let values = values.into().cuda(self.cuda()?, NAME, "values")?;
        let count = values.view().len();
        let pointer = values.view().pointer();
        self.run("all-reduce", count, |library, communicator, stream| {
            // SAFETY: `values` is memory of the device of the communicator with `count` elements of
            // this type, borrowed until `run` has waited for the operation or aborted it; whatever
            // uses or frees it later is queued behind. In place is allowed. `run` promises that the
            // context is bound, and that communicator and stream are those of the device.
            unsafe {
                let reduction = reduction.code();
                (library.all_reduce)(
                    pointer,
                    pointer,
                    count,
                    T::CODE,
                    reduction,
                    communicator,
                    stream,
                )
            }
        })
    }

    /// Copies the values of the rank `root` to `values` of every other rank.
    ///
    /// # Errors
    /// [`NcclError::Rank`] if the root is no rank; those of [`Nccl::all_reduce`].
    pub fn broadcast<'a, T: NcclElement>(
        &self,
        values: impl Into<ViewMut<'a, T>>,
        root: u32,
    ) -> Result<(), NcclError> {
        const NAME: &str = "broadcast";
        check_rank(root, self.size)?;
        let values = values.into().cuda(self.cuda()?, NAME, "values")?;
        let count = values.view().len();
        let pointer = values.view().pointer();
        self.run("broadcast", count, |library, communicator, stream| {
            let root = root as c_int;
            // SAFETY: As for `all_reduce`. The root is below the size, which is a `c_int`.
            unsafe {
                (library.broadcast)(pointer, pointer, count, T::CODE, root, communicator, stream)
            }
        })
    }

    /// Writes the parts of all ranks to `all` of every rank, in the order of the ranks.
    ///
    /// # Errors
    /// [`ComputeError::Length`] in [`NcclError::Compute`] if `all` has not `size` times the
    /// elements of `part`; those of [`Nccl::all_reduce`].
    pub fn all_gather<'a, 'b, T: NcclElement>(
        &self,
        part: impl Into<View<'a, T>>,
        all: impl Into<ViewMut<'b, T>>,
    ) -> Result<(), NcclError> {
        const NAME: &str = "all_gather";
        let part = part.into().cuda(self.cuda()?, NAME, "part")?;
        let all = all.into().cuda(self.cuda()?, NAME, "all")?;
        let count = part.len();
        check_length(NAME, "all", all.view().len(), self.times_size(count))?;
        let from = part.pointer();
        let to = all.view().pointer();
        self.run("all-gather", count, |library, communicator, stream| {
            // SAFETY: As for `all_reduce`. `part` has `count` elements and `all` that many for each
            // rank, and they do not overlap, because `all` is borrowed to be changed.
            unsafe { (library.all_gather)(from, to, count, T::CODE, communicator, stream) }
        })
    }

    /// Reduces the values of all ranks, element by element, and writes to `part` this rank's share
    /// of the result: of `size` equal shares that of the index `rank`.
    ///
    /// # Errors
    /// [`ComputeError::Length`] in [`NcclError::Compute`] if `all` has not `size` times the
    /// elements of `part`; those of [`Nccl::all_reduce`].
    pub fn reduce_scatter<'a, 'b, T: NcclElement>(
        &self,
        all: impl Into<View<'a, T>>,
        part: impl Into<ViewMut<'b, T>>,
        reduction: NcclReduction,
    ) -> Result<(), NcclError> {
        const NAME: &str = "reduce_scatter";
        let all = all.into().cuda(self.cuda()?, NAME, "all")?;
        let part = part.into().cuda(self.cuda()?, NAME, "part")?;
        let count = part.view().len();
        check_length(NAME, "all", all.len(), self.times_size(count))?;
        let from = all.pointer();
        let to = part.view().pointer();
        self.run("reduce-scatter", count, |library, communicator, stream| {
            let reduction = reduction.code();
            // SAFETY: As for `all_gather`, with the two exchanged.
            unsafe {
                (library.reduce_scatter)(from, to, count, T::CODE, reduction, communicator, stream)
            }
        })
    }

    /// Returns the device, which is a CUDA device since the join.
    fn cuda(&self) -> Result<&Arc<CudaDevice>, NcclError> {
        match self.device.backend() {
            Backend::Cuda(cuda) => Ok(cuda),
            Backend::Cpu(_) => Err(NcclError::NotCuda { device: self.device.to_string() }),
        }
    }

    fn times_size(&self, count: usize) -> usize {
        count.saturating_mul(self.size as usize)
    }

    /// Queues an operation on `count` elements, and waits for it. A failure ends the communicator.
    /// No element needs no operation: the other ranks have none either.
    ///
    /// `queue` is called at most once, with the context bound, with a communicator that has no
    /// operation under way, and with the stream of its device.
    fn run(
        &self,
        doing: &'static str,
        count: usize,
        queue: impl FnOnce(&NcclLibrary, Communicator, CUstream) -> c_int,
    ) -> Result<(), NcclError> {
        let mut slot = self.communicator.lock().unwrap_or_else(PoisonError::into_inner);
        let communicator = slot.as_ref().ok_or(NcclError::Ended { doing })?;
        if count == 0 {
            return Ok(());
        }
        communicator.device.bind()?;
        let deadline = Deadline::start(doing, self.timeout);
        let stream = communicator.device.stream.handle();
        let code = queue(communicator.library, communicator.get(), stream);
        let result =
            communicator.settle(code, &deadline).and_then(|()| communicator.wait(&deadline));
        if result.is_err() {
            *slot = None;
        }
        result
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Nccl");
        fields.field("rank", &self.rank).field("size", &self.size);
        fields.field("device", &format_args!("{}", self.device)).finish_non_exhaustive()
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let slot = self.communicator.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(communicator) = slot.take() {
            communicator.leave(self.timeout.min(LEAVE_TIMEOUT));
        }
    }
}

/// The most time that a drop waits for the other ranks.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

fn check_rank(rank: u32, size: u32) -> Result<(), NcclError> {
    match rank < size {
        true => Ok(()),
        false => Err(NcclError::Rank { rank, size }),
    }
}

/// An operation and the time until which it must be done.
#[derive(Debug)]
struct Deadline {
    doing: &'static str,
    timeout: Duration,
    started: Instant,
}

impl Deadline {
    fn start(doing: &'static str, timeout: Duration) -> Deadline {
        Deadline { doing, timeout, started: Instant::now() }
    }

    fn check(&self) -> Result<(), NcclError> {
        match self.started.elapsed() < self.timeout {
            true => Ok(()),
            false => Err(NcclError::Timeout { doing: self.doing, timeout: self.timeout }),
        }
    }
}

/// A communicator of the library. The drop aborts it, which ends its operations on the device.
#[derive(Debug)]
struct OpenCommunicator {
    library: &'static NcclLibrary,
    device: Arc<CudaDevice>,
    /// The communicator, or null if there is none. In memory of its own, because a thread of the
    /// library may write it until the join is done, and aborting waits for that thread.
    pointer: Box<AtomicPtr<c_void>>,
}

impl OpenCommunicator {
    /// Joins as one rank, and waits for the others.
    fn join(
        &self,
        id: &NcclId,
        rank: c_int,
        size: c_int,
        timeout: Duration,
    ) -> Result<(), NcclError> {
        self.device.bind()?;
        let deadline = Deadline::start("join the communicator", timeout);
        // SAFETY: The context is bound, by which the library knows the device. The settings are
        // copied by the call. The pointer is written while this value lives, which owns its memory.
        let code = unsafe {
            (self.library.init_rank_config)(
                self.pointer.as_ptr(),
                size,
                *id,
                rank,
                &Settings::NON_BLOCKING,
            )
        };
        self.settle(code, &deadline)
    }

    fn get(&self) -> Communicator {
        self.pointer.load(Ordering::Acquire)
    }

    /// Returns the state of the communicator: whether its last call is done, under way or failed.
    fn state(&self) -> c_int {
        let communicator = self.get();
        if communicator.is_null() {
            return INTERNAL_ERROR;
        }
        let mut state = SUCCESS;
        // SAFETY: The communicator was made by the library and is neither destroyed nor aborted.
        // The function writes one state, for which there is room.
        match unsafe { (self.library.get_async_error)(communicator, &mut state) } {
            SUCCESS => state,
            code => code,
        }
    }

    /// Polls until the call that has returned this code is done. Then the library has queued its
    /// work, and takes the next call.
    fn settle(&self, code: c_int, deadline: &Deadline) -> Result<(), NcclError> {
        let mut code = code;
        let mut pause = Duration::from_micros(10);
        while code == IN_PROGRESS {
            deadline.check()?;
            thread::sleep(pause);
            pause = (2 * pause).min(Duration::from_millis(1));
            code = self.state();
        }
        match code {
            SUCCESS => Ok(()),
            code => Err(NcclError::failed(deadline.doing, code)),
        }
    }

    /// Waits until the device has done its queued work.
    fn wait(&self, deadline: &Deadline) -> Result<(), NcclError> {
        let (sender, done) = channel();
        self.device.when_done(move |result| {
            // After a timeout nobody waits.
            let _ = sender.send(result);
        });
        await_work(&done, || self.settle(self.state(), deadline), deadline)
    }

    /// Leaves the communicator. If the other ranks do not in time, aborts it.
    fn leave(self, timeout: Duration) {
        // Nobody hears of an error here. The library knows the device of its communicator, so the
        // context need not be bound.
        let _ = self.device.bind();
        let deadline = Deadline::start("leave the communicator", timeout);
        // SAFETY: The communicator was made by the library and has no operation under way.
        let code = unsafe { (self.library.finalize)(self.get()) };
        if self.settle(code, &deadline).is_ok() {
            let communicator = self.pointer.swap(std::ptr::null_mut(), Ordering::AcqRel);
            // SAFETY: The communicator is finalized, and is not used any more: nothing else has its
            // pointer.
            let _ = unsafe { (self.library.destroy)(communicator) };
        }
    }
}

impl Drop for OpenCommunicator {
    fn drop(&mut self) {
        let communicator = std::mem::replace(self.pointer.get_mut(), std::ptr::null_mut());
        if communicator.is_null() {
            return;
        }
        // Nobody hears of an error here. The abort is done even if the context cannot be bound: it
        // waits for the thread that may write the pointer.
        let _ = self.device.bind();
        // SAFETY: The communicator was made by the library, is not destroyed, and is not used any
        // more: nothing else has its pointer.
        let _ = unsafe { (self.library.abort)(communicator) };
    }
}

/// The time between two checks of work that is under way on the device.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// Waits for the result of queued work. Meanwhile checks the communicator: the work of a rank whose
/// peer is lost never ends by itself.
fn await_work(
    done: &Receiver<Result<(), ComputeError>>,
    check: impl Fn() -> Result<(), NcclError>,
    deadline: &Deadline,
) -> Result<(), NcclError> {
    loop {
        match done.recv_timeout(CHECK_INTERVAL) {
            Ok(result) => {
                result?;
                // The work may have ended because the communicator has failed.
                return check();
            }
            Err(RecvTimeoutError::Timeout) => {
                check()?;
                deadline.check()?;
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(NcclError::failed(deadline.doing, INTERNAL_ERROR));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_never_ends_is_given_up() {
        let (sender, done) = channel();
        let deadline = Deadline::start("all-reduce", Duration::from_millis(1));
        let given_up = await_work(&done, || Ok(()), &deadline);
        assert_eq!(given_up, deadline.check());
        assert!(matches!(given_up, Err(NcclError::Timeout { doing: "all-reduce", .. })));
        let deadline = Deadline::start("all-reduce", Duration::MAX);
        let lost = || Err(NcclError::failed("all-reduce", 6));
        assert_eq!(await_work(&done, lost, &deadline), lost());
        sender.send(Ok(())).unwrap();
        assert_eq!(await_work(&done, lost, &deadline), lost(), "the work has ended with the rank");
        sender.send(Ok(())).unwrap();
        assert_eq!(await_work(&done, || Ok(()), &deadline), Ok(()));
    }
}
