//! Images as summaries show them.

use std::ops::RangeInclusive;

use thiserror::Error;

/// An image, encoded as PNG.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SummaryImage {
    width: u32,
    height: u32,
    channels: u8,
    png: Vec<u8>,
}

impl SummaryImage {
    /// Takes the bytes of a PNG file. Its size is read from its first chunk; the rest is not
    /// checked, and a browser may be unable to show it.
    ///
    /// # Errors
    /// If the bytes do not begin as a PNG file does, or if an edge is 0 or above 2^31 - 1.
    pub fn from_png(png: impl Into<Vec<u8>>) -> Result<SummaryImage, ImageError> {
        let png = png.into();
        let (width, height, channels) = header(&png)?;
        Ok(SummaryImage { width, height, channels, png })
    }

    /// Encodes pixels as PNG. They are in rows from the top, each from the left, with one byte for
    /// each channel.
    ///
    /// # Errors
    /// If an edge is 0, or if there are not width x height pixels.
    #[cfg(feature = "png")]
    pub fn from_pixels(
        width: u32,
        height: u32,
        channels: ImageChannels,
        pixels: &[u8],
    ) -> Result<SummaryImage, ImageError> {
        check_edges(width, height)?;
        let bytes = u128::from(width) * u128::from(height) * u128::from(channels as u8);
        if bytes != pixels.len() as u128 {
            let found = pixels.len();
            return Err(ImageError::Pixels { width, height, channels: channels as u8, found });
        }
        let encoded = encode(width, height, channels, pixels);
        let png = encoded.map_err(|cause| ImageError::Encoding { text: cause.to_string() })?;
        Ok(SummaryImage { width, height, channels: channels as u8, png })
    }

    /// Returns the width in pixels.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Returns the height in pixels.
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Returns the bytes of the PNG file.
    pub fn png(&self) -> &[u8] {
        &self.png
    }

    /// Returns the number of channels: 1 grey, 2 with alpha, 3 red, green and blue, 4 with alpha.
    pub(crate) fn channels(&self) -> u8 {
        self.channels
    }
}

/// The channels of a pixel, one byte each.
#[cfg(feature = "png")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageChannels {
    /// One channel, from black to white.
    Gray = 1,
    /// Two channels: grey and opacity.
    GrayAlpha = 2,
    /// Red, green and blue.
    Rgb = 3,
    /// Red, green, blue and opacity.
    Rgba = 4,
}

/// The reason why bytes are no image.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The bytes do not begin with the signature and the header of a PNG file.
    #[error("cannot use {bytes} bytes as an image: they do not begin as a PNG file")]
    NotPng {
        /// The number of bytes that were given.
        bytes: usize,
    },
    /// The color type in the header is none of PNG.
    #[error("cannot use an image of the PNG color type {color_type}")]
    ColorType {
        /// The color type in the header.
        color_type: u8,
    },
    /// An edge has no pixel, or more than a PNG can have.
    #[error("cannot use an image of {width} x {height} pixels: an edge must be 1 to 2^31 - 1")]
    Edges {
        /// The width in pixels.
        width: u32,
        /// The height in pixels.
        height: u32,
    },
    /// There are not as many bytes as pixels and channels.
    #[error("cannot encode {found} bytes as {width} x {height} pixels of {channels} channels")]
    Pixels {
        /// The width in pixels.
        width: u32,
        /// The height in pixels.
        height: u32,
        /// The number of channels of a pixel.
        channels: u8,
        /// The number of bytes that were given.
        found: usize,
    },
    /// The PNG encoder failed.
    #[error("cannot encode an image: {text}")]
    Encoding {
        /// The text of the encoder.
        text: String,
    },
}

/// Reads width, height and channels from the header chunk of a PNG file.
fn header(png: &[u8]) -> Result<(u32, u32, u8), ImageError> {
    let Some((head, _)) = png.split_first_chunk::<26>().filter(|(head, _)| head[..16] == *START)
    else {
        return Err(ImageError::NotPng { bytes: png.len() });
    };
    let edge = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let width = edge(16);
    let height = edge(20);
    check_edges(width, height)?;
    let channels = match head[25] {
        0 => 1,
        4 => 2,
        // A palette has red, green and blue.
        2 | 3 => 3,
        6 => 4,
        color_type => return Err(ImageError::ColorType { color_type }),
    };
    Ok((width, height, channels))
}

fn check_edges(width: u32, height: u32) -> Result<(), ImageError> {
    match EDGE.contains(&width) && EDGE.contains(&height) {
        true => Ok(()),
        false => Err(ImageError::Edges { width, height }),
    }
}

#[cfg(feature = "png")]
fn encode(
    width: u32,
    height: u32,
    channels: ImageChannels,
    pixels: &[u8],
) -> Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_color(match channels {
        ImageChannels::Gray => png::ColorType::Grayscale,
        ImageChannels::GrayAlpha => png::ColorType::GrayscaleAlpha,
        ImageChannels::Rgb => png::ColorType::Rgb,
        ImageChannels::Rgba => png::ColorType::Rgba,
    });
    let mut writer = encoder.write_header()?;
    writer.write_image_data(pixels)?;
    writer.finish()?;
    Ok(bytes)
}

/// Signature of a PNG file, and length and name of its first chunk.
const START: &[u8; 16] = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR";

/// The edges that PNG allows.
const EDGE: RangeInclusive<u32> = 1..=i32::MAX as u32;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A white pixel, written by another program.
    pub(crate) const WHITE: &[u8] =
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\0\0\0\0:~\x9bU\
        \0\0\0\nIDATx\x9cc\xf8\x0f\0\x01\x01\x01\0\xb18\xf6\x14\0\0\0\0IEND\xaeB`\x82";

    fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut png = WHITE.to_vec();
        png[at..at + bytes.len()].copy_from_slice(bytes);
        png
    }

    #[test]
    fn the_size_is_in_the_header() {
        let image = SummaryImage::from_png(WHITE).unwrap();
        assert_eq!((image.width(), image.height(), image.channels()), (1, 1, 1));
        let image = SummaryImage::from_png(with(16, &[0, 1, 0, 2, 0, 0, 0, 3, 8, 6])).unwrap();
        assert_eq!((image.width(), image.height(), image.channels()), (65538, 3, 4));
        for (color_type, channels) in [(0, 1), (2, 3), (3, 3), (4, 2), (6, 4)] {
            let image = SummaryImage::from_png(with(25, &[color_type])).unwrap();
            assert_eq!(image.channels(), channels);
        }
    }

    #[test]
    fn other_bytes_are_refused() {
        for end in 0..26 {
            let error = SummaryImage::from_png(&WHITE[..end]).unwrap_err();
            assert_eq!(error, ImageError::NotPng { bytes: end });
        }
        let table = [
            (with(0, b"GIF8"), "begin as a PNG file"),
            (with(12, b"IDAT"), "begin as a PNG file"),
            (with(16, &[0; 4]), "0 x 1 pixels"),
            (with(20, &[0x80, 0, 0, 0]), "1 x 2147483648 pixels"),
            (with(25, &[7]), "color type 7"),
        ];
        for (png, part) in table {
            let error = SummaryImage::from_png(png).unwrap_err().to_string();
            assert!(error.starts_with("cannot use") && error.contains(part), "{error}");
        }
    }

    #[cfg(feature = "png")]
    #[test]
    fn pixels_survive_the_encoder() {
        use ImageChannels::{Gray, GrayAlpha, Rgb, Rgba};
        for channels in [Gray, GrayAlpha, Rgb, Rgba] {
            let pixels: Vec<u8> = (0..6 * channels as u8).map(|i| i.wrapping_mul(37)).collect();
            let image = SummaryImage::from_pixels(3, 2, channels, &pixels).unwrap();
            let again = SummaryImage::from_png(image.png()).unwrap();
            assert_eq!(again, image);
            let cursor = std::io::Cursor::new(image.png());
            let mut reader = png::Decoder::new(cursor).read_info().unwrap();
            let mut decoded = vec![0; pixels.len()];
            reader.next_frame(&mut decoded).unwrap();
            assert_eq!(decoded, pixels);
        }
    }

    #[cfg(feature = "png")]
    #[test]
    fn pixels_must_fill_the_image() {
        let table = [
            ((2, 2, &[0_u8; 3][..]), "3 bytes as 2 x 2 pixels of 1 channels"),
            ((u32::MAX >> 1, u32::MAX >> 1, &[0; 4]), "4 bytes as 2147483647 x 2147483647"),
            ((0, 2, &[]), "0 x 2 pixels"),
        ];
        for ((width, height, pixels), part) in table {
            let made = SummaryImage::from_pixels(width, height, ImageChannels::Gray, pixels);
            let error = made.unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
