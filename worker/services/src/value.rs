//! Values that calls take and return: tensors, and bytes.

use std::fmt;
use std::sync::Arc;

use pushpull_common::protocol::limits;
use pushpull_common::protocol::message::ValueIs;
use pushpull_common::protocol::wire::List;
use pushpull_common::tensor::{DType, Element, Shape};
use pushpull_worker::internal::AlignedBuffer;

use super::value_error::ValueError;

/// The kind of the elements of a value: numbers of a type, or bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Elements {
    /// Numbers of one element type.
    Tensor(DType),
    /// Bytes without a type, such as text.
    Bytes,
}

impl Elements {
    /// The wire code of bytes. The codes of tensors are [`DType::code`].
    const BYTES: u8 = 0;

    /// Returns the size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            Elements::Tensor(dtype) => dtype.size(),
            Elements::Bytes => 1,
        }
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Elements::Tensor(dtype) => dtype.code(),
            Elements::Bytes => Elements::BYTES,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Elements> {
        match code {
            Elements::BYTES => Some(Elements::Bytes),
            code => DType::from_code(code).map(Elements::Tensor),
        }
    }
}

impl fmt::Display for Elements {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Elements::Tensor(dtype) => dtype.fmt(f),
            Elements::Bytes => f.write_str("bytes"),
        }
    }
}

/// The type of a value: its elements and its shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueType {
    elements: Elements,
    shape: Shape,
}

impl ValueType {
    pub(crate) fn new(elements: Elements, shape: Shape) -> ValueType {
        ValueType { elements, shape }
    }

    /// Returns the kind of the elements.
    pub fn elements(&self) -> Elements {
        self.elements
    }

    /// Returns the extents, outermost first. Bytes have one: their number.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the size of a value in bytes.
    ///
    /// No overflow: a shape has at most 2^48 elements.
    pub fn bytes(&self) -> u64 {
        self.shape.elements() * self.elements.size() as u64
    }

    /// Returns the size of a value in a body, padded to a multiple of 8 bytes.
    pub(crate) fn padded_bytes(&self) -> u64 {
        self.bytes().next_multiple_of(ALIGNMENT)
    }

    /// Returns the form on the wire.
    pub(crate) fn to_wire(&self) -> ValueIs {
        const { assert!(limits::VALUE_RANK_MAX == Shape::RANK_MAX) };
        let extents = List::of(self.shape.extents().iter().copied());
        ValueIs { elements: self.elements.code(), extents: extents.unwrap_or_default() }
    }

    /// Returns the type of a form on the wire, or the reason why it is invalid.
    pub(crate) fn from_wire(wire: &ValueIs) -> Result<ValueType, String> {
        let code = wire.elements;
        let elements =
            Elements::from_code(code).ok_or_else(|| format!("no elements have code {code}"))?;
        let shape = Shape::new(wire.extents.items()).map_err(|error| error.to_string())?;
        match (elements, shape.rank()) {
            (Elements::Bytes, rank) if rank != 1 => Err(format!("bytes of rank {rank}")),
            _ => Ok(ValueType { elements, shape }),
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.elements, self.shape)
    }
}

/// The alignment of values in a body, in bytes, which suits elements of every type.
const ALIGNMENT: u64 = 8;

/// The lowest use that values are counted with, in bytes. They keep memory of up to four times
/// this size.
const SHARED_MEMORY_MIN: u64 = 4096;

/// A tensor or bytes, as a call takes and returns them.
///
/// A clone shares the memory.
///
/// ```
/// use pushpull_services::Value;
///
/// let value = Value::tensor(&[2, 2], &[1.0_f32, 2.0, 3.0, 4.0])?;
/// assert_eq!(value.view::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
/// assert_eq!(value.to_string(), "f32 [2, 2]");
/// assert_eq!(Value::from("hello").text()?, "hello");
/// # Ok::<(), pushpull_services::ValueError>(())
/// ```
#[derive(Clone)]
pub struct Value {
    is: ValueType,
    memory: Arc<AlignedBuffer>,
    /// The offset of the value in the memory in bytes, a multiple of 8.
    start: usize,
}

impl Value {
    /// Copies a tensor of this shape, in row-major order.
    ///
    /// # Errors
    /// [`ValueError::Shape`] for an invalid shape, [`ValueError::Length`] if there are more or
    /// fewer elements than it has.
    pub fn tensor<T: Element>(shape: &[u64], elements: &[T]) -> Result<Value, ValueError> {
        let mut value = Value::zeros::<T>(shape)?;
        let expected = value.is.shape.elements();
        let found = elements.len() as u64;
        if expected != found {
            return Err(ValueError::Length { shape: shape.to_vec(), found });
        }
        value.view_mut::<T>()?.copy_from_slice(elements);
        Ok(value)
    }

    /// A tensor of zeros. Fill it with [`Value::view_mut`].
    ///
    /// # Errors
    /// [`ValueError::Shape`] for an invalid shape.
    pub fn zeros<T: Element>(shape: &[u64]) -> Result<Value, ValueError> {
        let shape = Shape::new(shape)?;
        Value::zeroed(ValueType { elements: Elements::Tensor(T::DTYPE), shape })
    }

    /// Takes memory that begins with this many bytes. Returns `None` above 2^48 bytes.
    pub(crate) fn of_bytes(memory: AlignedBuffer, bytes: usize) -> Option<Value> {
        let shape = Shape::new([bytes as u64]).ok()?;
        let is = ValueType { elements: Elements::Bytes, shape };
        Some(Value { is, memory: Arc::new(memory), start: 0 })
    }

    /// Allocates a value of zeros.
    pub(crate) fn zeroed(is: ValueType) -> Result<Value, ValueError> {
        let bytes = is.bytes();
        let memory = AlignedBuffer::try_of_bytes(bytes as usize);
        let memory = Arc::new(memory.ok_or(ValueError::Memory { bytes })?);
        Ok(Value { is, memory, start: 0 })
    }

    /// A tensor of one element and no axes.
    pub fn scalar<T: Element>(element: T) -> Value {
        let is = ValueType { elements: Elements::Tensor(T::DTYPE), shape: Shape::scalar() };
        let mut memory = AlignedBuffer::of_bytes(size_of::<T>());
        memory.bytes_mut()[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&element));
        Value { is, memory: Arc::new(memory), start: 0 }
    }

    /// Copies bytes.
    ///
    /// # Errors
    /// [`ValueError::Shape`] above 2^48 bytes.
    pub fn bytes(bytes: &[u8]) -> Result<Value, ValueError> {
        let shape = Shape::new([bytes.len() as u64])?;
        let mut memory = AlignedBuffer::of_bytes(bytes.len());
        memory.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        let is = ValueType { elements: Elements::Bytes, shape };
        Ok(Value { is, memory: Arc::new(memory), start: 0 })
    }

    /// Takes the next value of this type from memory that holds several, at `start`. Returns `None`
    /// if the memory is too short.
    pub(crate) fn of_memory(
        is: ValueType,
        memory: &Arc<AlignedBuffer>,
        start: &mut usize,
    ) -> Option<Value> {
        let begin = *start;
        let bytes = usize::try_from(is.padded_bytes()).ok()?;
        let end = begin.checked_add(bytes).filter(|&end| end <= memory.bytes().len())?;
        *start = end;
        Some(Value { is, memory: memory.clone(), start: begin })
    }

    /// Copies values out of memory of which they are a small part, so that they hold no more memory
    /// than they need. The inputs of a call share one memory, and a function may return one of
    /// them. A value stays in place if the system has no memory for the copy.
    pub(crate) fn detach_all<'a>(values: impl IntoIterator<Item = &'a mut Value>) {
        let mut values: Vec<&mut Value> = values.into_iter().collect();
        let used = |of: &[&mut Value], memory: &Arc<AlignedBuffer>| {
            let within = of.iter().filter(|value| Arc::ptr_eq(&value.memory, memory));
            within.map(|value| value.is.padded_bytes()).sum::<u64>()
        };
        let is_small = |of: &[&mut Value], value: &Value| {
            let whole = value.memory.bytes().len() as u64;
            whole / 4 > used(of, &value.memory).max(SHARED_MEMORY_MIN)
        };
        // All are judged before the first copy changes what the others share.
        let small: Vec<usize> =
            (0..values.len()).filter(|&index| is_small(&values, values[index])).collect();
        for index in small {
            let value = &mut *values[index];
            let bytes = value.is.bytes() as usize;
            let Some(mut copy) = AlignedBuffer::try_of_bytes(bytes) else { continue };
            copy.bytes_mut()[..bytes].copy_from_slice(value.as_bytes());
            value.memory = Arc::new(copy);
            value.start = 0;
        }
    }

    /// Returns the element type and the shape.
    pub fn value_type(&self) -> &ValueType {
        &self.is
    }

    /// Returns the extents, outermost first.
    pub fn shape(&self) -> &Shape {
        &self.is.shape
    }

    /// Returns the bytes of the elements, little-endian.
    pub fn as_bytes(&self) -> &[u8] {
        &self.memory.bytes()[self.start..][..self.is.bytes() as usize]
    }

    /// Returns the memory and the range in it of the bytes with their padding, for the body of a
    /// frame.
    pub(crate) fn padded(&self) -> (&Arc<AlignedBuffer>, std::ops::Range<usize>) {
        let end = self.start + self.is.padded_bytes() as usize;
        (&self.memory, self.start..end)
    }

    /// Returns the elements of a tensor, in row-major order.
    ///
    /// # Errors
    /// [`ValueError::Elements`] if its elements have another type.
    pub fn view<T: Element>(&self) -> Result<&[T], ValueError> {
        self.check::<T>()?;
        Ok(bytemuck::cast_slice(self.as_bytes()))
    }

    /// Returns the elements of a tensor for changes. Copies them if a clone of the value exists.
    ///
    /// # Errors
    /// [`ValueError::Elements`] if its elements have another type.
    pub fn view_mut<T: Element>(&mut self) -> Result<&mut [T], ValueError> {
        self.check::<T>()?;
        let bytes = self.is.bytes() as usize;
        if Arc::get_mut(&mut self.memory).is_none() {
            let mut copy = AlignedBuffer::of_bytes(bytes);
            copy.bytes_mut()[..bytes].copy_from_slice(self.as_bytes());
            self.memory = Arc::new(copy);
            self.start = 0;
        }
        let memory = Arc::get_mut(&mut self.memory).expect("nothing shares a memory just copied");
        Ok(bytemuck::cast_slice_mut(&mut memory.bytes_mut()[self.start..][..bytes]))
    }

    fn check<T: Element>(&self) -> Result<(), ValueError> {
        match self.is.elements == Elements::Tensor(T::DTYPE) {
            true => Ok(()),
            false => Err(ValueError::Elements {
                expected: Elements::Tensor(T::DTYPE),
                found: self.is.elements,
            }),
        }
    }

    /// Returns the element of a tensor with exactly one.
    ///
    /// # Errors
    /// [`ValueError::Elements`] and [`ValueError::NotScalar`].
    pub fn element<T: Element>(&self) -> Result<T, ValueError> {
        match self.view::<T>()? {
            [element] => Ok(*element),
            _ => Err(ValueError::NotScalar { shape: self.is.shape.extents().to_vec() }),
        }
    }

    /// Returns bytes as text.
    ///
    /// # Errors
    /// [`ValueError::Elements`] for a tensor, [`ValueError::Text`] if the bytes are not UTF-8.
    pub fn text(&self) -> Result<&str, ValueError> {
        if self.is.elements != Elements::Bytes {
            let expected = Elements::Bytes;
            let found = self.is.elements;
            return Err(ValueError::Elements { expected, found });
        }
        let text = std::str::from_utf8(self.as_bytes());
        text.map_err(|error| ValueError::Text { valid_bytes: error.valid_up_to() })
    }

    /// Combines two tensors of one type element by element. A scalar is combined with each element
    /// of the other.
    ///
    /// # Errors
    /// [`ValueError::Elements`] if either has another type than `T`, [`ValueError::Shapes`] if
    /// their shapes differ.
    pub fn zip<T: Element>(
        &self,
        other: &Value,
        mut combine: impl FnMut(T, T) -> T,
    ) -> Result<Value, ValueError> {
        let left = self.view::<T>()?;
        let right = other.view::<T>()?;
        let wider = if self.shape().rank() == 0 { other } else { self };
        let mut result = Value::zeroed(wider.is.clone())?;
        let out = result.view_mut::<T>()?;
        if self.shape() == other.shape() {
            for ((out, &left), &right) in out.iter_mut().zip(left).zip(right) {
                *out = combine(left, right);
            }
        } else if other.shape().rank() == 0 {
            out.iter_mut().zip(left).for_each(|(out, &left)| *out = combine(left, right[0]));
        } else if self.shape().rank() == 0 {
            out.iter_mut().zip(right).for_each(|(out, &right)| *out = combine(left[0], right));
        } else {
            let shapes = [self, other].map(|value| value.shape().extents().to_vec());
            let [left, right] = shapes;
            return Err(ValueError::Shapes { left, right });
        }
        Ok(result)
    }
}

/// The text of a value is its type, such as `f32 [2, 2]`.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.is.fmt(f)
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Value({self})")
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Value) -> bool {
        self.is == other.is && self.as_bytes() == other.as_bytes()
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        let shape = Shape::new([text.len() as u64]).expect("a text has less than 2^48 bytes");
        let mut memory = AlignedBuffer::of_bytes(text.len());
        memory.bytes_mut()[..text.len()].copy_from_slice(text.as_bytes());
        let is = ValueType { elements: Elements::Bytes, shape };
        Value { is, memory: Arc::new(memory), start: 0 }
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::from(&text[..])
    }
}

macro_rules! scalars {
    ($($element:ty),*) => {$(
        impl From<$element> for Value {
            fn from(element: $element) -> Value {
                Value::scalar(element)
            }
        }
    )*};
}
scalars!(f32, f64, i64);

/// The type of a value that is larger than the address space of a process.
#[cfg(test)]
pub(crate) fn beyond_memory() -> ValueType {
    let shape = Shape::new([Shape::ELEMENTS_MAX]).expect("the largest shape");
    ValueType { elements: Elements::Tensor(DType::F64), shape }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_the_system_has_no_memory_for_is_an_error() {
        let shape = Vec::from(beyond_memory().shape().extents());
        let error = Value::zeros::<f64>(&shape).unwrap_err();
        assert_eq!(error, ValueError::Memory { bytes: 1 << 51 });
    }

    #[test]
    fn views_and_texts_check_the_elements() {
        let value = Value::tensor(&[3], &[1_i64, 2, 3]).unwrap();
        assert_eq!(value.view::<i64>().unwrap(), [1, 2, 3]);
        let other = value.view::<f32>().unwrap_err();
        assert_eq!(other.to_string(), "cannot use i64 as f32");
        assert!(value.element::<i64>().is_err() && value.text().is_err());
        assert_eq!(Value::scalar(2.5_f64).element::<f64>(), Ok(2.5));
        assert_eq!(Value::from("é").text(), Ok("é"));
        assert!(Value::bytes(&[0xff]).unwrap().text().is_err());
        assert!(Value::tensor(&[2], &[1.0_f32]).is_err());
        assert!(Value::zeros::<f32>(&[1; 9]).is_err());
    }

    #[test]
    fn a_change_leaves_clones_alone() {
        let mut value = Value::tensor(&[2], &[1.0_f32, 2.0]).unwrap();
        let clone = value.clone();
        value.view_mut::<f32>().unwrap()[0] = 7.0;
        assert_eq!(clone.view::<f32>().unwrap(), [1.0, 2.0]);
        assert_eq!(value.view::<f32>().unwrap(), [7.0, 2.0]);
    }

    #[test]
    fn tensors_are_combined_with_tensors_and_scalars() {
        let pair = Value::tensor(&[2], &[6.0_f32, 8.0]).unwrap();
        let two = Value::scalar(2.0_f32);
        let divide = |left: f32, right: f32| left / right;
        let quotient = pair.zip(&two, divide).unwrap();
        assert_eq!(quotient.view::<f32>().unwrap(), [3.0, 4.0]);
        let quotient = two.zip(&pair, divide).unwrap();
        assert_eq!(quotient.view::<f32>().unwrap(), [2.0 / 6.0, 2.0 / 8.0]);
        assert_eq!(pair.zip(&pair, divide).unwrap().view::<f32>().unwrap(), [1.0, 1.0]);
        let three = Value::zeros::<f32>(&[3]).unwrap();
        let differ = pair.zip(&three, divide).unwrap_err();
        assert_eq!(differ.to_string(), "cannot combine tensors of the shapes [2] and [3]");
        assert!(pair.zip(&Value::scalar(1_i64), divide).is_err());
    }

    #[test]
    fn values_of_one_memory_are_aligned() {
        let memory = Arc::new(AlignedBuffer::of_bytes(24));
        let of = |elements, extents: &[u64]| ValueType::new(elements, Shape::new(extents).unwrap());
        let mut start = 0;
        let text = Value::of_memory(of(Elements::Bytes, &[3]), &memory, &mut start).unwrap();
        let tensor = of(Elements::Tensor(DType::F64), &[2]);
        let tensor = Value::of_memory(tensor, &memory, &mut start).unwrap();
        assert_eq!((text.as_bytes().len(), tensor.view::<f64>().unwrap().len()), (3, 2));
        assert_eq!(start, 24);
        assert!(Value::of_memory(of(Elements::Bytes, &[1]), &memory, &mut start).is_none());
    }

    #[test]
    fn values_that_are_a_small_part_of_their_memory_are_copied_out_of_it() {
        let memory = Arc::new(AlignedBuffer::of_bytes(1 << 20));
        let of = |bytes: u64, start: usize| {
            let is = ValueType::new(Elements::Bytes, Shape::new([bytes]).unwrap());
            Value::of_memory(is, &memory, &mut { start }).unwrap()
        };
        let length = |value: &Value| value.memory.bytes().len();
        let mut small = [of(9, 0), of(20, 64), Value::from("own")];
        let before = small.clone();
        Value::detach_all(&mut small);
        assert_eq!(small, before);
        assert!(small.iter().all(|value| length(value) < 100));
        // Together they are much of it.
        let mut parts: Vec<Value> = (0..64).map(|part| of(8192, 8192 * part)).collect();
        Value::detach_all(&mut parts);
        assert!(parts.iter().all(|value| Arc::ptr_eq(&value.memory, &memory)));
    }

    #[test]
    fn types_round_trip_and_bad_ones_are_named() {
        let is = Value::zeros::<f32>(&[4, 5]).unwrap().is;
        assert_eq!(ValueType::from_wire(&is.to_wire()), Ok(is.clone()));
        assert_eq!(is.padded_bytes(), 80);
        let wire = |elements, extents: &[u64]| ValueIs {
            elements,
            extents: List::of(extents.iter().copied()).unwrap(),
        };
        for (wire, problem) in [
            (wire(9, &[1]), "no elements have code 9"),
            (wire(0, &[1, 2]), "bytes of rank 2"),
            (wire(1, &[1 << 40, 1 << 40]), "more than 281474976710656 elements"),
        ] {
            let found = ValueType::from_wire(&wire).unwrap_err();
            assert!(found.contains(problem), "{found}");
        }
    }
}
