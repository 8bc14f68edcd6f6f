//! Decodes operands: registers, constants, variables and addresses.

use super::{Decoder, Name};
use crate::ptx::error::PtxError;
use crate::ptx::instruction::{FRAME, MemoryOperand, PtxOperation, Register, Space, Special, ZERO};
use crate::ptx::syntax::Operand;
use crate::scalar::{Type, binary, unary};

impl Decoder<'_> {
    pub(super) fn new_register(&mut self) -> Register {
        self.code.registers += 1;
        (self.code.registers - 1) as Register
    }

    pub(super) fn constant(&mut self, bits: u64) -> Register {
        if let Some(&register) = self.constants.get(&bits) {
            return register;
        }
        let register = self.new_register();
        self.constants.insert(bits, register);
        self.code.constants.push((register, bits));
        register
    }

    pub(super) fn lookup(&self, name: &str) -> Option<Name> {
        self.scopes.iter().rev().find_map(|scope| scope.get(name).copied())
    }

    pub(super) fn register(&self, name: &str) -> Result<(Register, Type), PtxError> {
        match self.lookup(name) {
            Some(Name::Register(register, of)) => Ok((register, of)),
            _ => Err(self.unknown_name(name)),
        }
    }

    /// Returns the register that an instruction writes. `_` is one that nothing reads.
    pub(super) fn destination(&mut self, operand: &Operand) -> Result<(Register, Type), PtxError> {
        match operand {
            Operand::Name(name) if name == "_" => Ok((self.new_register(), Type::B64)),
            Operand::Name(name) => self.register(name),
            _ => Err(self.unknown()),
        }
    }

    /// Returns the register that has the value of an operand.
    pub(super) fn source(&mut self, operand: &Operand, of: Type) -> Result<Register, PtxError> {
        match operand {
            Operand::Name(name) => self.named(name, 0),
            Operand::Integer(value) => Ok(self.constant(*value as u64 & of.mask())),
            Operand::Float32(bits) => Ok(self.constant(u64::from(*bits))),
            Operand::Float64(bits) if of == Type::F32 => {
                let value = f64::from_bits(*bits) as f32;
                Ok(self.constant(u64::from(value.to_bits())))
            }
            Operand::Float64(bits) => Ok(self.constant(*bits)),
            Operand::Not(name) => {
                let (a, _) = self.register(name)?;
                let d = self.new_register();
                let f = unary("not", Type::Pred).ok_or_else(|| self.unknown())?;
                self.emit(PtxOperation::Unary { f, d, a });
                Ok(d)
            }
            Operand::Address { base: Some(name), offset } => self.named(name, *offset),
            _ => Err(self.unknown()),
        }
    }

    /// Returns a register with the value of a register, or with the address of a variable.
    fn named(&mut self, name: &str, offset: i64) -> Result<Register, PtxError> {
        match self.lookup(name) {
            Some(Name::Register(register, _)) if offset == 0 => return Ok(register),
            Some(Name::Register(..)) => return Err(self.unknown()),
            Some(Name::Local(at)) => {
                let b = self.constant((at + offset) as u64);
                let d = self.new_register();
                let f = binary("add", Type::U64).ok_or_else(|| self.unknown())?;
                self.emit(PtxOperation::Binary { f, d, a: FRAME, b });
                return Ok(d);
            }
            Some(Name::Parameter(at, _)) => return Ok(self.constant((at + offset) as u64)),
            None => {}
        }
        if let Some(special) = Special::parse(name) {
            if let Some(&register) = self.specials.get(&special) {
                return Ok(register);
            }
            let register = self.new_register();
            self.specials.insert(special, register);
            self.code.specials.push((register, special));
            return Ok(register);
        }
        if name == "WARP_SZ" {
            return Ok(self.constant(32));
        }
        if name.starts_with("%clock") {
            let d = self.new_register();
            self.emit(PtxOperation::Clock { d });
            return Ok(d);
        }
        match self.symbol(name) {
            Some(address) => Ok(self.constant(address.wrapping_add_signed(offset))),
            None => Err(self.unknown_name(name)),
        }
    }

    /// The address of a variable outside of the function, in its own space.
    fn symbol(&self, name: &str) -> Option<u64> {
        let shared = self.symbols.shared.get(name);
        shared.or_else(|| self.symbols.addresses.get(name)).copied()
    }

    pub(super) fn address(
        &mut self,
        operand: &Operand,
        space: Space,
    ) -> Result<MemoryOperand, PtxError> {
        let Operand::Address { base, offset } = operand else { return Err(self.unknown()) };
        let offset = *offset;
        let Some(name) = base else { return Ok(MemoryOperand { space, base: ZERO, offset }) };
        Ok(match self.lookup(name) {
            Some(Name::Register(base, _)) => MemoryOperand { space, base, offset },
            Some(Name::Local(at)) => MemoryOperand { space, base: FRAME, offset: at + offset },
            Some(Name::Parameter(at, _)) => {
                MemoryOperand { space, base: ZERO, offset: at + offset }
            }
            None => {
                let at = self.symbol(name).ok_or_else(|| self.unknown_name(name))?;
                MemoryOperand { space, base: ZERO, offset: (at as i64).wrapping_add(offset) }
            }
        })
    }

    pub(super) fn unknown_name(&self, name: &str) -> PtxError {
        PtxError::UnknownName { line: self.line, name: name.to_owned() }
    }
}
