//! Executes the instructions of one thread until it waits or ends.

use super::fault::{DeviceFaultKind, Other};
use super::memory::{Access, Accessor, GlobalMemory, RaceShadow, Region};
use super::thread::{CallFrame, LaunchGeometry, SchedulingState, Thread};
use crate::ptx::{
    AtomicOperation, CallInstruction, LOCAL_WINDOW, LoadInstruction, MemoryOperand, Program,
    PtxOperation, Register, SHARED_WINDOW, Space, StoreInstruction,
};
use crate::scalar::{Type, convert};

/// The environment in which the threads of a block execute.
pub(crate) struct Environment<'a> {
    pub(crate) program: &'a Program,
    pub(crate) memory: &'a mut GlobalMemory,
    pub(crate) shared: Region,
    pub(crate) shared_races: RaceShadow,
    pub(crate) geometry: LaunchGeometry,
    /// The linear index of the block.
    pub(crate) block: u32,
    pub(crate) epoch: u32,
    /// The number of the launch, for marks in global memory.
    pub(crate) launch: u64,
    /// The number of instructions that may still be executed.
    pub(crate) steps_left: u64,
    pub(crate) steps_max: u64,
    /// For each function, where the accesses of each instruction were last.
    pub(crate) hints: Vec<Vec<usize>>,
}

impl Environment<'_> {
    /// Executes a thread until it waits or ends. On a fault it stands at the instruction.
    pub(crate) fn run(&mut self, thread: &mut Thread) -> Result<(), DeviceFaultKind> {
        while thread.state == SchedulingState::Ready {
            self.run_function(thread)?;
        }
        Ok(())
    }

    /// Executes a thread until it waits, ends, calls or returns.
    fn run_function(&mut self, thread: &mut Thread) -> Result<(), DeviceFaultKind> {
        let function = thread.function;
        let program = self.program;
        let code = program.functions[function].instructions.as_slice();
        loop {
            let instruction = &code[thread.at];
            if self.steps_left == 0 {
                return Err(DeviceFaultKind::StepBudget { steps: self.steps_max });
            }
            self.steps_left -= 1;
            if let Some(guard) = instruction.guard
                && (thread.get(guard.register) & 1 == 1) == guard.negated
            {
                thread.at += 1;
                continue;
            }
            match &instruction.operation {
                &PtxOperation::Move { d, a } => thread.set(d, thread.get(a)),
                &PtxOperation::Unary { f, d, a } => thread.set(d, f(thread.get(a))),
                &PtxOperation::Binary { f, d, a, b } => {
                    thread.set(d, f(thread.get(a), thread.get(b)));
                }
                &PtxOperation::Ternary { f, d, a, b, c } => {
                    thread.set(d, f(thread.get(a), thread.get(b), thread.get(c)));
                }
                &PtxOperation::Divide { f, of, d, a, b } => {
                    let divisor = thread.get(b) & of.mask();
                    if divisor == 0 {
                        return Err(DeviceFaultKind::DivisionByZero);
                    }
                    thread.set(d, f(thread.get(a), divisor));
                }
                &PtxOperation::Convert { how, d, a } => thread.set(d, convert(how, thread.get(a))),
                &PtxOperation::Compare { f, combine, d, q, a, b } => {
                    let holds = u64::from(f(thread.get(a), thread.get(b)));
                    let (yes, no) = match combine {
                        None => (holds, holds ^ 1),
                        Some((join, c)) => {
                            (join(holds, thread.get(c)), join(holds ^ 1, thread.get(c)))
                        }
                    };
                    thread.set(q, no);
                    thread.set(d, yes);
                }
                &PtxOperation::Carry { how, d, a, b, c } => {
                    let a = thread.get(a);
                    let b = thread.get(b);
                    let c = thread.get(c);
                    let (sum, carry) = how.apply(a, b, c, thread.carry);
                    thread.set(d, sum);
                    if how.sets {
                        thread.carry = carry;
                    }
                }
                PtxOperation::Load(load) => self.load(thread, load)?,
                PtxOperation::Store(store) => self.store(thread, store)?,
                &PtxOperation::Atomic { address, of, how, d, a, b } => {
                    let operands = [thread.get(a), thread.get(b)];
                    self.atomic(thread, address, of, how, d, operands)?;
                }
                &PtxOperation::Branch { target } => {
                    thread.at = target as usize;
                    continue;
                }
                PtxOperation::BranchTable { index, targets } => {
                    let index = thread.get(*index);
                    let target = usize::try_from(index).ok().and_then(|index| targets.get(index));
                    thread.at = *target.ok_or(DeviceFaultKind::BranchIndex { index })? as usize;
                    continue;
                }
                PtxOperation::Call(call) => return self.call(thread, call),
                PtxOperation::Return if !thread.frames.is_empty() => {
                    self.leave(thread);
                    return Ok(());
                }
                PtxOperation::Return | PtxOperation::Exit => {
                    thread.state = SchedulingState::Exited;
                    return Ok(());
                }
                PtxOperation::Barrier { .. } => {
                    thread.state = SchedulingState::AtBarrier;
                    return Ok(());
                }
                PtxOperation::WarpBarrier { .. }
                | PtxOperation::Shuffle(_)
                | PtxOperation::Vote { .. }
                | PtxOperation::Match { .. }
                | PtxOperation::ActiveMask { .. } => {
                    thread.state = SchedulingState::AtWarp;
                    return Ok(());
                }
                &PtxOperation::Clock { d } => thread.set(d, self.steps_max - self.steps_left),
                PtxOperation::Nothing => {}
                PtxOperation::Trap => return Err(DeviceFaultKind::Trap),
            }
            thread.at += 1;
        }
    }

    fn call(&mut self, thread: &mut Thread, call: &CallInstruction) -> Result<(), DeviceFaultKind> {
        if thread.frames.len() >= DEPTH_MAX {
            return Err(DeviceFaultKind::CallDepth { depth: DEPTH_MAX });
        }
        let program = self.program;
        let caller = &program.functions[thread.function];
        let callee = &program.functions[call.function as usize];
        let frame = thread.get(crate::ptx::FRAME) as usize;
        let frame = (frame + caller.local.size()).next_multiple_of(64) + 64;
        let mut parameters = vec![0; callee.parameters];
        for &(here, there, size) in &call.arguments {
            let here = here as usize;
            let there = there as usize;
            let size = size as usize;
            parameters[there..there + size].copy_from_slice(&thread.parameters[here..here + size]);
        }
        let saved = CallFrame {
            function: thread.function,
            at: thread.at,
            registers: std::mem::take(&mut thread.registers),
            parameters: std::mem::replace(&mut thread.parameters, parameters),
        };
        thread.frames.push(saved);
        thread.function = call.function as usize;
        thread.at = 0;
        thread.enter(callee, frame, &self.geometry);
        Ok(())
    }

    /// Returns to the caller, and stores the results in the registers that its call names.
    fn leave(&mut self, thread: &mut Thread) {
        let Some(saved) = thread.frames.pop() else { return };
        let program = self.program;
        let code = &program.functions[thread.function];
        let frame = thread.get(crate::ptx::FRAME) as usize;
        for range in &code.local.ranges {
            thread.local.unmap(frame + range.start..frame + range.end);
        }
        let results = std::mem::replace(&mut thread.parameters, saved.parameters);
        thread.registers = saved.registers;
        thread.function = saved.function;
        thread.at = saved.at;
        let call = &program.functions[thread.function].instructions[thread.at].operation;
        if let PtxOperation::Call(call) = call {
            for &(here, there, size) in &call.results {
                let here = here as usize;
                let there = there as usize;
                let size = size as usize;
                thread.parameters[here..here + size].copy_from_slice(&results[there..there + size]);
            }
        }
        thread.at += 1;
    }

    fn load(&mut self, thread: &mut Thread, load: &LoadInstruction) -> Result<(), DeviceFaultKind> {
        let size = load.of.size();
        let lanes = usize::from(load.lanes);
        let value = self.read(thread, load.address, size * lanes, load.shared)?;
        for (lane, &d) in load.d[..lanes].iter().enumerate() {
            let bits = number(&value[lane * size..(lane + 1) * size]);
            let value = if load.of.is_signed() { load.of.wide(bits) as u64 } else { bits };
            thread.set(d, value & load.mask);
        }
        Ok(())
    }

    fn store(
        &mut self,
        thread: &mut Thread,
        store: &StoreInstruction,
    ) -> Result<(), DeviceFaultKind> {
        let size = store.of.size();
        let lanes = usize::from(store.lanes);
        let mut value = [0; 32];
        for (lane, &source) in store.sources[..lanes].iter().enumerate() {
            let bits = thread.get(source).to_le_bytes();
            value[lane * size..(lane + 1) * size].copy_from_slice(&bits[..size]);
        }
        self.write(thread, store.address, &value[..lanes * size], store.shared)
    }

    fn atomic(
        &mut self,
        thread: &mut Thread,
        address: MemoryOperand,
        of: Type,
        how: AtomicOperation,
        d: Register,
        [a, b]: [u64; 2],
    ) -> Result<(), DeviceFaultKind> {
        // An atomic operation is a write for all checks but that of the initial value.
        let size = of.size();
        let old = number(&self.peek(thread, address, size)?[..size]);
        let new = match how {
            AtomicOperation::Apply(f) => f(old, a),
            AtomicOperation::CompareAndSwap if old == a & of.mask() => b,
            AtomicOperation::CompareAndSwap => old,
        };
        self.write(thread, address, &new.to_le_bytes()[..size], true)?;
        thread.set(d, old);
        Ok(())
    }

    fn read(
        &mut self,
        thread: &Thread,
        address: MemoryOperand,
        size: usize,
        atomic: bool,
    ) -> Result<[u8; 16], DeviceFaultKind> {
        let (space, at) = resolve(thread, address);
        let access = self.access(thread, false, atomic);
        match space {
            Space::Parameter => parameter(&thread.parameters, at, size),
            Space::Local => thread.local.read(at, size),
            Space::Shared => {
                let value = self.shared.read(at, size)?;
                self.note_shared(at, size, access)?;
                Ok(value)
            }
            _ => {
                let hint = &mut self.hints[thread.function][thread.at];
                self.memory.read(at, size, access, hint)
            }
        }
    }

    /// Reads the old value of an atomic operation, which is noted when it is written.
    fn peek(
        &mut self,
        thread: &Thread,
        address: MemoryOperand,
        size: usize,
    ) -> Result<[u8; 16], DeviceFaultKind> {
        match resolve(thread, address) {
            (Space::Shared, at) => self.shared.read(at, size),
            _ => self.read(thread, address, size, true),
        }
    }

    fn write(
        &mut self,
        thread: &mut Thread,
        address: MemoryOperand,
        value: &[u8],
        atomic: bool,
    ) -> Result<(), DeviceFaultKind> {
        let (space, at) = resolve(thread, address);
        let access = self.access(thread, true, atomic);
        match space {
            Space::Parameter => {
                parameter(&thread.parameters, at, value.len())?;
                let at = at as usize;
                thread.parameters[at..at + value.len()].copy_from_slice(value);
                Ok(())
            }
            Space::Local => thread.local.write(at, value),
            Space::Shared => {
                self.shared.write(at, value)?;
                self.note_shared(at, value.len(), access)
            }
            _ => {
                let hint = &mut self.hints[thread.function][thread.at];
                self.memory.write(at, value, access, hint)
            }
        }
    }

    fn note_shared(&mut self, at: u64, size: usize, access: Access) -> Result<(), DeviceFaultKind> {
        // Each block has its own shared memory, so its marks are those of a launch of its own.
        let launch = self.launch << 24 | u64::from(self.block & 0xff_ffff);
        let access = Access { by: Accessor { launch, ..access.by }, ..access };
        self.shared_races.note(at as usize, size, access).map_err(|race| {
            let other = Other { block: race.block, thread: race.thread, wrote: race.wrote };
            DeviceFaultKind::Race { space: Space::Shared, address: race.at as u64, other }
        })
    }

    fn access(&self, thread: &Thread, writes: bool, atomic: bool) -> Access {
        let by = Accessor {
            launch: self.launch,
            block: self.block,
            thread: thread.linear,
            epoch: self.epoch,
            warp_epoch: thread.warp_epoch,
        };
        Access { by, writes, atomic }
    }
}

/// Finds the space of an address, and its place there.
fn resolve(thread: &Thread, address: MemoryOperand) -> (Space, u64) {
    let at = thread.get(address.base).wrapping_add_signed(address.offset);
    match address.space {
        Space::Generic if at.wrapping_sub(SHARED_WINDOW) < WINDOW => {
            (Space::Shared, at - SHARED_WINDOW)
        }
        Space::Generic if at.wrapping_sub(LOCAL_WINDOW) < WINDOW => {
            (Space::Local, at - LOCAL_WINDOW)
        }
        space => (space, at),
    }
}

fn parameter(parameters: &[u8], at: u64, size: usize) -> Result<[u8; 16], DeviceFaultKind> {
    let place = usize::try_from(at).ok().and_then(|at| Some(at..at.checked_add(size)?));
    let bytes = place.and_then(|place| parameters.get(place));
    let space = Space::Parameter;
    let address = at;
    let bytes =
        bytes.ok_or(DeviceFaultKind::OutOfBounds { space, address, size, allocation: None })?;
    let mut value = [0; 16];
    value[..size].copy_from_slice(bytes);
    Ok(value)
}

fn number(bytes: &[u8]) -> u64 {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(all)
}

/// The size of the windows of shared and local memory in the generic address space.
const WINDOW: u64 = 1 << 32;
const DEPTH_MAX: usize = 256;
